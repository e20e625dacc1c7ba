"""The memory plan adds up, and refuses with the numbers."""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import Any

import pytest

from moec.manifests.bundle import TABLES_NAME, BundleManifest, FileEntry
from moec.manifests.errors import MemoryBudgetExceeded, OptionError
from moec.manifests.runtime_limits import DEFAULT_CONTEXT, MAX_PASS_TOKENS
from moec.manifests.sizes import option_bytes
from moec.profiles.memory_floor import (
    EXPERT_ENTRY_BYTES,
    LOGITS_ROWS_PER_SLOT,
    PROCESS_BYTES,
    PROCESS_SLACK_BYTES,
    TORCH_PROCESS_BYTES,
    scratch_bytes,
)
from moec.runtime.memory import budget
from moec.runtime.memory.budget import nominal_memory, plan_memory
from moec.runtime.options.runtime import RuntimeOptions
from tests.manifests.examples import example_manifest

PROCESS, AVAILABLE = 50_000_000, 800_000_000
MANIFEST: BundleManifest = example_manifest()


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "resident_set_bytes", lambda: PROCESS)
    monkeypatch.setattr(budget, "available_memory_bytes", lambda: AVAILABLE)


def plan(**options: Any) -> budget.MemoryPlan:
    return plan_memory(MANIFEST, RuntimeOptions(**options))


def test_the_floor_by_hand() -> None:
    """Process, dense weights, keys and values, scratch, and one layer's top-k experts."""
    found = plan(memory="1GB", context=100, slots=3)
    kv = 100 * 3 * (2 * 2 * 2 * 8 * 4)
    # Widest: queries, their result, keys and values, against the parts and the hidden rows of the experts.
    widest = max(2 * 4 * 8 + 2 * 2 * 8, 2 * 32 + 2 * 64)
    rope = 100 * 8 * 4
    norms = 4 * 32 * (2 * 2 + 1)
    scratch = (
        4 * 300 * (5 * 32 + widest) + 8 * 50 * LOGITS_ROWS_PER_SLOT * 3 + rope + norms + 4 * 2 * 8 * 100
    )  # and a slot put aside
    assert (found.kv_bytes, found.scratch_bytes) == (kv, scratch)
    process, tables = PROCESS_BYTES + 7 * EXPERT_ENTRY_BYTES, 12 * 2 * 4
    assert (found.process_bytes, found.tables_bytes) == (process, tables)
    fixed = process + tables + MANIFEST.cost.dense_packed_bytes + kv + scratch
    assert found.fixed_bytes == fixed and found.floor_bytes == fixed + MANIFEST.cost.minimum_expert_bytes
    assert found.to_plain()["floor_bytes"] == found.floor_bytes and found.context == 100


def test_a_budget_at_the_floor_works_and_one_byte_less_is_refused_with_the_number() -> None:
    floor = plan(memory="1GB").floor_bytes
    found = plan(memory=str(floor))
    assert found.cache_bytes == MANIFEST.cost.minimum_expert_bytes and found.budget_bytes == floor
    told = f"`--memory {floor - 1}` is under the floor of {option_bytes(floor)}"
    with pytest.raises(MemoryBudgetExceeded, match=told):
        plan(memory=str(floor - 1))
    with pytest.raises(MemoryBudgetExceeded, match=f"the floor of {option_bytes(floor)}"):
        plan(memory="0")


@pytest.mark.parametrize(("slots", "remedy"), [(1, "a shorter `--context`"), (4, "fewer `--slots`")])
def test_a_budget_under_the_floor_is_told_what_would_make_the_floor_lower(slots: int, remedy: str) -> None:
    with pytest.raises(MemoryBudgetExceeded) as caught:
        plan(memory="1KiB", slots=slots)
    assert caught.value.hint is not None and caught.value.hint.endswith(f", or {remedy}")


@pytest.mark.parametrize(("given", "unit"), [("1KB", "MB"), ("2KB", "MB"), ("1KiB", "MiB"), ("2KiB", "MiB")])
def test_a_refusal_has_the_units_of_the_option(given: str, unit: str) -> None:
    least = -(-plan(memory="1GB").floor_bytes // {"MB": 10**6, "MiB": 2**20}[unit])
    with pytest.raises(
        MemoryBudgetExceeded, match=f"`--memory {given}` is under the floor of {least}{unit} "
    ) as caught:
        plan(memory=given)
    assert f"--memory {least}{unit}" in str(caught.value.hint)
    with pytest.raises(MemoryBudgetExceeded, match=rf"`--expert-cache {given}` is under the floor of \d+{unit} \(hint"):
        plan(expert_cache=given, memory="1GB")


def test_the_rest_is_for_experts_and_never_more_than_all_of_them() -> None:
    floor, total = plan(memory="1GB").floor_bytes, MANIFEST.cost.expert_padded_bytes
    assert plan(memory=str(floor + 100)).cache_bytes == MANIFEST.cost.minimum_expert_bytes + 100
    assert plan(memory="1GB").cache_bytes == total


@pytest.mark.parametrize("options", [{"expert_cache": "50%"}, {"expert_cache": "1MiB"}, {"memory": "1GB"}, "least"])
def test_lossy_modes_decide_alike_on_pages_of_any_size(monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", 65536)
    if options == "least":  # of the larger pages
        options = {"memory": str(plan(memory="1GB").floor_bytes)}
    large = plan(**options)
    monkeypatch.setattr(mmap, "PAGESIZE", 4096)
    small = plan(**options)
    assert large.logical_cache_bytes == small.logical_cache_bytes >= MANIFEST.cost.minimum_expert_bytes
    assert small.cache_bytes == small.logical_cache_bytes <= large.cache_bytes


@pytest.mark.parametrize("page", [4096, 16384, 65536])
def test_all_experts_fit_in_pages_of_any_size(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", page)
    total = sum(-(-entry.size_bytes // page) * page for entry in MANIFEST.experts)
    assert plan(memory="1GB").cache_bytes == total == plan(expert_cache="100%").cache_bytes
    least = plan(memory="1GB").minimum_expert_bytes
    assert least % page == 0 and least >= MANIFEST.cost.minimum_expert_bytes
    assert (least == MANIFEST.cost.minimum_expert_bytes) == (page == 4096)
    floor = plan(memory="1GB").floor_bytes
    assert plan(memory=str(floor)).cache_bytes == least
    with pytest.raises(MemoryBudgetExceeded):
        plan(memory=str(floor - 1))


def test_seven_eighths_of_what_is_available_by_default() -> None:
    found = plan()
    assert found.budget_bytes == PROCESS + AVAILABLE * 7 // 8
    assert found.cache_bytes == MANIFEST.cost.expert_padded_bytes


def test_a_named_cache() -> None:
    total, minimum = MANIFEST.cost.expert_padded_bytes, MANIFEST.cost.minimum_expert_bytes
    assert plan(expert_cache="100%").cache_bytes == total and plan(expert_cache="50%").cache_bytes == total // 2
    assert plan(expert_cache=str(minimum)).cache_bytes == minimum
    assert plan(expert_cache="1GiB").cache_bytes == total and plan(expert_cache="1GiB").budget_bytes is None
    told = f"`--expert-cache {minimum - 1}` is under the floor of {option_bytes(minimum)}"
    with pytest.raises(MemoryBudgetExceeded, match=told):
        plan(expert_cache=str(minimum - 1))
    with pytest.raises(MemoryBudgetExceeded) as caught:
        plan(expert_cache="50")
    assert caught.value.hint is not None and caught.value.hint.endswith("a share is written `50%`")


def test_both_given() -> None:
    fixed, total = plan(memory="1GB").fixed_bytes, MANIFEST.cost.expert_padded_bytes
    assert plan(memory=str(fixed + total), expert_cache="100%").cache_bytes == total
    least = fixed + total
    told = f"needs a budget of {option_bytes(least)}, `--memory {least - 1}` is less"
    with pytest.raises(MemoryBudgetExceeded, match=told):
        plan(memory=str(least - 1), expert_cache="100%")


def test_context() -> None:
    assert plan().context == MANIFEST.model.max_positions == plan(context=128).context
    with pytest.raises(OptionError, match="`--context 129` is longer than the 128 positions"):
        plan(context=129)
    long = replace(MANIFEST, model=replace(MANIFEST.model, max_positions=1 << 20))
    assert plan_memory(long, RuntimeOptions()).context == DEFAULT_CONTEXT
    assert plan_memory(long, RuntimeOptions(context=1 << 12, slots=2)).context == 1 << 12
    with pytest.raises(MemoryBudgetExceeded, match="for a context of 1048576"):
        plan_memory(long, RuntimeOptions(context=1 << 20, slots=2000))


def test_scratch_follows_the_longest_pass() -> None:
    ten, eleven, twelve = (scratch_bytes(MANIFEST.model, 1, context) for context in (10, 11, 12))
    assert twelve - eleven == eleven - ten > 0
    longer = scratch_bytes(MANIFEST.model, 1, 10 * MAX_PASS_TOKENS) - scratch_bytes(MANIFEST.model, 1, MAX_PASS_TOKENS)
    assert longer == 9 * MAX_PASS_TOKENS * 8 * 4, "cosines and sines alone follow the context"


def test_the_machine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert budget.resident_set_bytes() > 1 << 20 and budget.available_memory_bytes() > 0


def test_lossy_decisions_beside_an_accelerator_allow_for_torch() -> None:
    """The memory is equal. All experts fit next to the nominal process, none fit next to that of torch."""
    bare, least = plan(context=100), MANIFEST.cost.minimum_expert_bytes
    torch = TORCH_PROCESS_BYTES - PROCESS_BYTES
    lossy: dict[str, Any] = {"context": 100, "lossy": "cache-routing drop=0.1"}
    lossy["memory"] = str(bare.fixed_bytes + torch + least)
    alone = plan(**lossy)
    with_device = plan(**lossy, accelerator="cuda", accelerator_memory="1GB")
    assert alone.cache_bytes == alone.logical_cache_bytes == MANIFEST.cost.expert_padded_bytes
    assert with_device.cache_bytes == with_device.logical_cache_bytes == least


def test_the_plan_is_the_nominal_one_until_the_process_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """`inspect` and the compiler use the nominal process. A larger process counts in full."""
    nominal = nominal_memory(MANIFEST)
    assert plan(memory="1GB").floor_bytes == nominal.floor_bytes
    taken = nominal.process_bytes - PROCESS_SLACK_BYTES
    for more in (-1, 0, 1, 1000):
        monkeypatch.setattr(budget, "resident_set_bytes", lambda more=more: taken + more)
        assert plan(memory="1GB").floor_bytes == nominal.floor_bytes + max(more, 0)


def test_tables_and_tokenizer_count_by_the_sizes_of_their_files() -> None:
    def grown(name: str, size_bytes: int) -> BundleManifest:
        others = [entry for entry in MANIFEST.files if entry.name != name]
        return replace(MANIFEST, files=(*others, FileEntry(name, size_bytes, "0" * 64)))

    large, small = grown(TABLES_NAME, 240_000_000), nominal_memory(MANIFEST).floor_bytes
    assert nominal_memory(large).floor_bytes == small, "lookahead asks for no path"
    path = RuntimeOptions(prefetch="path")
    assert nominal_memory(large, path).floor_bytes == small + 480_000_000
    with pytest.raises(MemoryBudgetExceeded, match=r"under the floor of 5\d\dMiB"):
        plan_memory(large, RuntimeOptions(memory=str(small), prefetch="path"))
    assert nominal_memory(grown("tokenizer.json", 30_000_000)).floor_bytes == small + 13 * 30_000_000
