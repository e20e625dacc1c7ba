"""Lossy modes: what each changes, what it must not, and that a run repeats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.manifests.errors import OptionError
from moec.manifests.model import RouterSpec, StaticRouting
from moec.profiles.memory_floor import PROCESS_SLACK_BYTES
from moec.runtime import RuntimeOptions, kernels, load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.engine.batch import forced_logits, generate_many
from moec.runtime.memory.budget import nominal_process_bytes
from moec.runtime.modes.decoder import check_modes
from moec.runtime.modes.mode_counts import ModeCounts
from moec.runtime.options.lossy import parse_lossy
from tests.gates.bundles import emit_bundle
from tests.runtime.cache_kinds import kernels_of
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

Decoded = Callable[..., tuple[np.ndarray, ModeCounts | None]]
ALL_MODES = {"lossy": "big-little gamma=0.055,k=K/2 + cache-routing margin=0.3,drop=0.1 + dynamic-precision 0.4,0.8"}
PROMPTS = [[5, 60, 31, 7], [90, 2, 8], [17, 33, 4, 9, 12]]


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


def counts_of(found: ModeCounts | None) -> ModeCounts:
    assert found is not None
    return found


@pytest.fixture
def exact(decoded: Decoded) -> np.ndarray:
    logits, counts = decoded(expert_cache="100%")
    assert counts is None
    return logits


@pytest.mark.parametrize("modes", [{"lossy": "dynamic-precision 0,0.5"}, {"lossy": "cache-routing margin=1,drop=1"}])
def test_where_nothing_is_missed_nothing_changes(decoded: Decoded, exact: np.ndarray, modes: dict[str, str]) -> None:
    logits, counts = decoded(expert_cache="100%", **modes)
    assert same(logits, exact)
    found = counts_of(counts)
    assert found.ranks == 20 * 3 * 4 and found.low == found.skipped == found.replaced == found.dropped == 0


def test_a_token_computed_again_is_the_models_own(decoded: Decoded, exact: np.ndarray) -> None:
    """Its keys and values are, too: all tokens after it are equal as well."""
    logits, counts = decoded(expert_cache="60%", lossy="big-little gamma=1")
    assert same(logits, exact)
    found = counts_of(counts)
    assert found.fallback_tokens == found.tokens == 20
    assert 0 < found.foretold_right < found.foretold == 20 * 3 * 4


def test_the_little_model_has_half_the_experts(decoded: Decoded, two_version_bundle: Path) -> None:
    with load(two_version_bundle, context=64, expert_cache="100%", lossy="big-little gamma=0") as engine:
        engine.prefill([5, 6, 7])
        before = engine.cache.stats.copy()
        engine.decode([9], [0], [3])
        assert engine.cache.stats.since(before).lookups == 3 * 2
    one, counts = decoded(expert_cache="100%", lossy="big-little gamma=0,k=1")
    assert counts_of(counts).ranks == 20 * 3 and counts_of(counts).fallback_tokens == 0
    three, counts = decoded(expert_cache="100%", lossy="big-little gamma=0,k=3")
    assert counts_of(counts).ranks == 20 * 3 * 3 and not np.array_equal(one, three)


def test_misses_become_low_versions_or_nothing(decoded: Decoded, exact: np.ndarray) -> None:
    start = {"expert_cache": "50%", "cache_state": "cold", "prefetch": "off"}
    low, counts = decoded(**start, lossy="dynamic-precision 0,1")
    found = counts_of(counts)
    assert found.low > 20 and found.skipped == 0
    skipping, counts = decoded(**start, lossy="dynamic-precision 0,0")
    found = counts_of(counts)
    assert found.low == 0 and found.skipped > 20
    distance = [float(np.abs(logits - exact).mean()) for logits in (low, skipping)]
    assert 0 < distance[0] < distance[1]
    high, counts = decoded(**start, lossy="dynamic-precision 1,1")
    assert counts_of(counts).low == counts_of(counts).skipped == 0 and same(high, exact)


def prompted(path: Path, kernels_name: str | None = None, **options: Any) -> tuple[np.ndarray, ModeCounts | None, int]:
    """The residual stream after a short prompt, the decisions, and the bytes read for it."""
    small = {"context": 64, "expert_cache": "50%", "cache_state": "cold"}
    with kernels_of(kernels_name or kernels.active()), load(path, **small, **options) as engine:
        engine.begin_sequence()
        hidden = engine.prefill(PROMPTS[0]).copy()
        engine.cache.check_invariants()
        return hidden, engine.mode_counts, engine.cache.stats.bytes_read


@pytest.mark.parametrize("prefetch", ["off", "lookahead"])
def test_a_prompt_reads_fewer_bytes(two_version_bundle: Path, prefetch: str) -> None:
    exact, _, all_bytes = prompted(two_version_bundle, prefetch=prefetch)
    found, counts, some_bytes = prompted(two_version_bundle, prefetch=prefetch, lossy="dynamic-precision 0.2,0.7")
    assert some_bytes < 0.9 * all_bytes and not np.array_equal(found, exact)
    told = counts_of(counts)
    assert told.prompt_low and told.prompt_skipped and told.ranks == told.low == 0
    high, counts, _ = prompted(two_version_bundle, prefetch=prefetch, lossy="dynamic-precision 1,1")
    assert same(high, exact) and counts_of(counts).prompt_low == 0


def test_other_modes_leave_a_prompt_alone(two_version_bundle: Path) -> None:
    exact, _, _ = prompted(two_version_bundle)
    found, counts, _ = prompted(two_version_bundle, lossy="big-little gamma=0.5 + cache-routing margin=0.9,drop=0.3")
    assert same(found, exact) and counts_of(counts).prompt_experts == 0


def test_numpy_decides_a_prompt_as_the_extension(two_version_bundle: Path) -> None:
    options = {"lossy": "dynamic-precision 0.2,0.7", "prefetch": "lookahead", "readers": 1}
    native, counts, _ = prompted(two_version_bundle, **options)
    plain, again, _ = prompted(two_version_bundle, "numpy", **options)
    assert counts_of(counts).prompt_low and counts == again
    assert np.allclose(native, plain, rtol=1e-3, atol=1e-3)


def test_sequences_of_a_pass_share_a_version(two_version_bundle: Path) -> None:
    """Decoded side by side, an expert is read in one version: the one that the most important token asks for."""
    options: dict[str, Any] = {"cache_state": "cold", "prefetch": "off", "slots": 3, "lossy": "dynamic-precision 0.3,1"}
    with load(two_version_bundle, context=64, expert_cache="60%", **options) as engine:
        seen, stream = list[list[int]](), engine.cache.stream

        def noted(layer: int, experts: list[int], *rest: Any, **more: Any) -> Any:
            seen.append(experts)
            return stream(layer, experts, *rest, **more)

        engine.cache.stream = noted  # type: ignore[method-assign]
        generate_many(engine, PROMPTS, [[]] * 3, [6] * 3)
        assert counts_of(engine.mode_counts).low
    assert all(len({index % 24 for index in experts}) == len(experts) for experts in seen)


def test_misses_become_cached_experts_or_nothing(decoded: Decoded, exact: np.ndarray) -> None:
    start = {"expert_cache": "50%", "prefetch": "off"}
    replaced, counts = decoded(**start, lossy="cache-routing margin=0.9")
    found = counts_of(counts)
    assert found.replaced > 10 and found.dropped == 0 and not np.array_equal(replaced, exact)
    _, counts = decoded(**start, lossy="cache-routing drop=0.2")
    assert counts_of(counts).dropped > 5 and counts_of(counts).replaced == 0
    _, counts = decoded(**start, lossy="cache-routing margin=0.01,drop=0.01")
    assert counts_of(counts).replaced < found.replaced


def test_fewer_misses_are_what_it_is_for(two_version_bundle: Path) -> None:
    reads = {}
    for name, modes in {"exact": {}, "routing": {"lossy": "cache-routing margin=0.9,drop=0.3"}}.items():
        with load(two_version_bundle, context=64, expert_cache="50%", prefetch="off", **modes) as engine:
            engine.cache.finish_warming()
            engine.begin_sequence()
            engine.prefill([5, 6, 7])
            before = engine.cache.stats.copy()
            for at in range(3, 40):
                engine.decode([4 + 7 * at % 200], [0], [at])
            reads[name] = engine.cache.stats.since(before).bytes_read
    assert reads["routing"] < 0.7 * reads["exact"]


@pytest.mark.parametrize("other", [{"readers": 4}, {"io": "mmap"}, {"threads": 1}, {"kernels": "scalar"}])
def test_a_run_repeats_whatever_the_machine_does(decoded: Decoded, other: dict[str, Any]) -> None:
    options: dict[str, Any] = {**ALL_MODES, "expert_cache": "50%", "cache_state": "cold"}
    first, counts = decoded(**options)
    with kernels_of(other.get("kernels", kernels.active())):
        again, repeated = decoded(**options, **{name: value for name, value in other.items() if name != "kernels"})
    assert same(first, again) and counts == repeated
    found = counts_of(counts)
    assert found.low and found.skipped and found.replaced and 0 < found.fallback_tokens < found.tokens


def test_a_cold_start_misses_more(two_version_bundle: Path) -> None:
    low = {}
    for state in ("warm", "cold"):
        options: dict[str, Any] = {"lossy": "dynamic-precision 0,1", "prefetch": "off", "cache_state": state}
        with load(two_version_bundle, context=64, expert_cache="90%", **options) as engine:
            engine.prefill([5])
            engine.decode([9], [0], [1])
            low[state] = counts_of(engine.mode_counts).low
    assert low["cold"] > low["warm"]


def test_the_logical_cache_is_the_cache_without_luck(two_version_bundle: Path) -> None:
    """With one reader and nothing read ahead, arrival has no part in it: both hold the same after every pass."""
    options: dict[str, Any] = {"expert_cache": "50%", "prefetch": "off", "readers": 1}
    with load(two_version_bundle, context=64, lossy="dynamic-precision 0.2,0.6", **options) as engine:
        engine.cache.finish_warming()
        engine.begin_sequence()
        engine.prefill([5, 6, 7])
        logical = engine.lossy.cache  # type: ignore[union-attr]
        assert logical is not None
        held, ever_held = list[int](), set[int]()
        for at in range(3, 30):
            held = [index for index in range(48) if logical.is_resident(index)]
            assert held == engine.cache.resident().tolist()
            ever_held |= set(held)
            engine.decode([4 + 7 * at % 200], [0], [at])
        assert any(index >= 24 for index in ever_held), "low versions take part"


def test_side_by_side_is_as_alone(two_version_bundle: Path) -> None:
    """Big-little reads no cache. The tokens of a sequence, forced or free, do not depend on other sequences."""
    alone: list[list[int]] = []
    options: dict[str, Any] = {"context": 64, "expert_cache": "60%", "lossy": "big-little gamma=0.055"}
    with load(two_version_bundle, **options) as engine:
        for prompt in PROMPTS:
            alone += [[step.token_id for step in engine.generate(prompt, 10)]]
        rows = dict(forced_logits(engine, [(prompt, [7, 8, 9]) for prompt in PROMPTS]))
        assert 0 < counts_of(engine.mode_counts).fallback_tokens < counts_of(engine.mode_counts).tokens
    with load(two_version_bundle, slots=3, **options) as engine:
        drafts = [list(range(10, 20))] * 3  # left aside
        assert generate_many(engine, PROMPTS, drafts, [10] * 3) == alone
        together = dict(forced_logits(engine, [(prompt, [7, 8, 9]) for prompt in PROMPTS]))
        assert all(same(together[at], rows[at]) and len(rows[at]) == 3 for at in range(3))


def test_forced_answers_are_decoded(two_version_bundle: Path) -> None:
    prompt, answer = PROMPTS[2], [7, 8, 9, 10]
    options: dict[str, Any] = {"context": 64, "expert_cache": "50%", "prefetch": "off"}
    options["lossy"] = "dynamic-precision 0,1"
    with load(two_version_bundle, **options) as engine:
        engine.cache.finish_warming()
        engine.begin_sequence()
        rows = [engine.model.logits(engine.prefill(prompt)[-1:])]
        rows += [engine.decode([token], [0], [len(prompt) + at]) for at, token in enumerate(answer[:-1])]
        assert counts_of(engine.mode_counts).low
    with load(two_version_bundle, **options) as engine:
        engine.cache.finish_warming()
        ((_, found),) = forced_logits(engine, [(prompt, answer)])
        assert same(found, np.concatenate(rows))
        ((_, behind_nothing),) = forced_logits(engine, [([], answer)])
        assert len(behind_nothing) == len(answer) - 1


def test_the_mode_line_names_what_is_lossy(two_version_bundle: Path) -> None:
    with load(two_version_bundle, context=64, expert_cache="50%", cache_state="cold", **ALL_MODES) as engine:
        assert f"LOSSY ({ALL_MODES['lossy']})" in engine.mode
        assert "cold start" in engine.mode and not engine.is_exact
    with load(two_version_bundle, context=64, expert_cache="50%") as engine:
        assert ", exact;" in engine.mode and engine.is_exact and engine.mode_counts is None


@pytest.mark.parametrize(
    ("modes", "told"),
    [
        ({"lossy": "big-little gamma=2"}, "`2` is not a number from 0 to 1"),
        ({"lossy": "big-little alpha=1"}, "`alpha=1` is not one of gamma, k"),
        ({"lossy": "big-little gamma=.5,gamma=.6"}, "is not one of"),
        ({"lossy": "big-little k=0"}, "k is `0`"),
        ({"lossy": "big-little k=4"}, "is the whole one, which has 4"),
        ({"lossy": "cache-routing margin=0"}, "changes nothing"),
        ({"lossy": "cache-routing 0.5"}, "is not one of margin, drop"),
        ({"lossy": "dynamic-precision 0.9"}, "is not two thresholds"),
        ({"lossy": "dynamic-precision 0.9,0.5"}, "T1 is above T2"),
        ({"lossy": "dynamic-precision a,b"}, "is not a number"),
        ({"cache_state": "hot"}, "unknown cache state"),
    ],
)
def test_modes_that_mean_nothing_are_refused(two_version_bundle: Path, modes: dict[str, str], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        load(two_version_bundle, context=64, **modes)


def test_low_versions_must_be_there(tiny_bundle: Path) -> None:
    with pytest.raises(OptionError, match="the bundle has none"):
        load(tiny_bundle, lossy="dynamic-precision 0.5,0.9")
    with load(tiny_bundle, context=64, expert_cache="50%", lossy="dynamic-precision 0.5,0.5") as engine:
        assert not engine.is_exact, "skipping needs none"


def test_a_budget_holds_both_versions(two_version_bundle: Path) -> None:
    options: dict[str, Any] = {"expert_cache": "100%", "lossy": "dynamic-precision 0,1", "cache_state": "cold"}
    with load(two_version_bundle, context=64, **options) as engine:
        engine.begin_sequence()
        engine.prefill([5, 6, 7])
        for at in range(3, 40):
            engine.decode([4 + 7 * at % 200], [0], [at])
            engine.cache.check_invariants()
        assert engine.cache.used_bytes <= open_bundle(two_version_bundle).manifest.cost.expert_padded_bytes
        assert engine.mode_counts is not None and engine.mode_counts.low > 0


def test_a_flat_router_is_seen() -> None:
    counts = ModeCounts()
    counts.count_weights(np.array([[0.7, 0.1, 0.15, 0.05]], np.float32))
    assert counts.to_plain()["lower_half_share"] == pytest.approx(0.15)
    counts.count_weights(np.full((3, 4), 0.1, np.float32))
    assert counts.to_plain()["lower_half_share"] == pytest.approx((0.15 + 3 * 0.5) / 4)


@pytest.mark.parametrize(
    ("router", "modes", "told"),
    [
        ({"scoring": "uniform", "static": True}, {"lossy": "big-little gamma=0.5"}, "experts follow from the token"),
        ({"scoring": "sparsemixer", "margin": 0.01}, {"lossy": "cache-routing margin=0.5"}, "weighs the two it chose"),
        ({"scoring": "sparsemixer", "margin": 0.01}, {"lossy": "big-little gamma=0.5"}, None),
    ],
)
def test_routers_that_a_mode_cannot_weigh_are_refused(
    two_version_bundle: Path, router: dict[str, Any], modes: dict[str, str], told: str | None
) -> None:
    model = open_bundle(two_version_bundle).manifest.model
    static = StaticRouting(tuple([0, 1] * model.vocab_size)) if router.pop("static", False) else None
    spec = RouterSpec(renormalize=False, static=static, **router)
    layers = [replace(layer, experts=replace(layer.experts, top_k=2, router=spec)) for layer in model.layers]
    asked = parse_lossy(modes["lossy"])
    if told is None:
        check_modes(asked, replace(model, layers=tuple(layers)), 0)
        return
    with pytest.raises(OptionError, match=told):
        check_modes(asked, replace(model, layers=tuple(layers)), 0)


def test_decisions_under_a_budget_do_not_go_by_what_the_process_takes(
    two_version_bundle: Path, decoded: Decoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decisions stay equal if Python takes 10 MiB more of the budget, or more than any run does."""
    with load(two_version_bundle, context=64) as engine:
        plan, experts = engine.memory, engine.bundle.manifest.cost.expert_padded_bytes
        nominal = nominal_process_bytes(engine.bundle.manifest, engine.options)
    budget = nominal + plan.fixed_bytes - plan.process_bytes + experts // 2
    options = {"memory": str(budget), "lossy": "dynamic-precision 0,1"}
    found = []
    for more_bytes in (-32 << 20, 0, experts // 8):
        taken_bytes = nominal - PROCESS_SLACK_BYTES + more_bytes
        monkeypatch.setattr("moec.runtime.memory.budget.resident_set_bytes", lambda taken=taken_bytes: taken)
        with load(two_version_bundle, context=64, **options) as engine:
            assert engine.memory.logical_cache_bytes == experts // 2
            assert engine.memory.cache_bytes == experts // 2 - max(more_bytes, 0)
            assert f"deciding by a cache of {experts / 2**21:.1f} MiB" in engine.mode
        found.append(decoded(**options))
    for logits, counts in found[1:]:
        assert same(logits, found[0][0]) and counts == found[0][1]
    assert 0 < counts_of(found[0][1]).missed < counts_of(found[0][1]).ranks


@pytest.mark.parametrize("mode", [{"lossy": "dynamic-precision 0,1"}, {"lossy": "cache-routing margin=0.5,drop=0.3"}])
def test_larger_pages_change_no_decision(
    decoded: Decoded, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
) -> None:
    options = {"expert_cache": "60%", **mode}
    (logits, counts) = decoded(**options)
    for page in (16384, 65536):
        monkeypatch.setattr("mmap.PAGESIZE", page)
        found = decoded(**options)
        assert same(found[0], logits) and found[1] == counts, page
    assert 0 < counts_of(counts).missed < counts_of(counts).ranks


def test_low_versions_that_no_mode_asks_for_change_nothing(two_version_bundle: Path, tmp_path: Path) -> None:
    folder = save_tiny_mixtral(tmp_path / "model", TinyMixtral(layers=3, experts=8, top_k=4, seed=5))
    plain = emit_bundle(folder, tmp_path / "bundle", bitwidth=8)
    found = []
    for path in (plain, two_version_bundle):
        with load(path, context=64, expert_cache="50%") as engine:
            assert engine.is_exact and bool(engine.bundle.manifest.low_experts) == (path is two_version_bundle)
            found.append(engine.logits(PROMPTS[0] * 5))
    assert same(*found)


def test_experts_that_are_weighed_as_a_pair_are_halved_for_several_texts_at_once(tmp_path: Path) -> None:
    path = emit_bundle(save_tiny_family(tmp_path / "model", TINY_FAMILIES["phimoe"]), tmp_path / "bundle")
    rows = []
    for slots in ([0, 1, 2], [1]):
        with load(path, context=32, slots=3, expert_cache="60%", lossy="big-little gamma=0.5") as engine:
            for slot in slots:
                engine.step([5, 9, 40, 41, 17, 8], [slot] * 6, range(6))
            rows.append(engine.decode([20 + slot for slot in slots], slots, [6] * len(slots)))
            assert engine.mode_counts is not None and engine.mode_counts.tokens == len(slots)
    assert same(rows[0][1:2], rows[1])


TOKENS = np.random.default_rng(8).integers(3, 250, 40).tolist()
ON = {"lossy": "expert-activations bfloat16"}
UNIT = 2.0**-8


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """16-bit experts; experts in many formats, one of them bfloat16; 8-bit experts."""
    root = tmp_path_factory.mktemp("activations")
    model = save_tiny_mixtral(root / "model", TinyMixtral(layers=3, seed=3))
    return (
        emit_bundle(model, root / "wide"),
        emit_bundle(model, root / "mixed", mixed=True),
        emit_bundle(model, root / "quantized", bitwidth=8),
    )


@pytest.fixture
def has_products() -> None:
    if not kernels.bfloat_kernels():
        pytest.skip(f"the kernels {kernels.active()} have no products of bfloat16")


def test_logits_differ_by_the_rounding_of_activations(bundles: tuple[Path, ...], has_products: None) -> None:
    few = TOKENS[:2]  # so few that none is close to the choice of another expert
    for path in bundles[:2]:
        with load(path, context=64) as floats, load(path, context=64, **ON) as rounded:
            expected, found = floats.logits(few), rounded.logits(few)
            assert 0 < np.abs(found - expected).max() < 4 * UNIT * np.abs(expected).max()
            assert "exact" in floats.mode and "LOSSY (expert-activations bfloat16)" in rounded.mode


@pytest.mark.parametrize("options", [{}, {"expert_cache": "60%", "io": "buffered"}, {"threads": 1, "prefetch": "off"}])
def test_a_pass_computes_what_its_tokens_compute_one_by_one(
    bundles: tuple[Path, ...], has_products: None, options: dict[str, Any]
) -> None:
    for path in bundles[:2]:
        with load(path, context=64, **ON) as engine:
            together = engine.logits(TOKENS)
        with load(path, context=64, **ON, **options) as engine:
            engine.begin_texts([0], [TOKENS])
            alone = [engine.decode([token], [0], [position]) for position, token in enumerate(TOKENS)]
            logits = np.concatenate([np.asarray(row).reshape(1, -1) for row in alone])
            assert np.array_equal(logits.view(np.uint32), together.view(np.uint32))
            assert "layers in one call" in engine.mode


def test_it_goes_together_with_modes_that_decide(bundles: tuple[Path, ...], has_products: None) -> None:
    with load(bundles[0], context=64, lossy=f"big-little gamma=0.5,k=1 + {ON['lossy']}") as engine:
        engine.logits(TOKENS)
        assert "LOSSY (big-little gamma=0.5,k=1 + expert-activations bfloat16)" in engine.mode


def test_it_is_refused_where_it_would_change_nothing(bundles: tuple[Path, ...]) -> None:
    with pytest.raises(OptionError, match="no expert of the bundle has bfloat16 weights"):
        load(bundles[2], **ON)


@pytest.mark.parametrize("name", ["numpy", "scalar"])
def test_it_is_refused_by_kernels_that_lack_it(bundles: tuple[Path, ...], name: str) -> None:
    if name not in kernels.available():
        pytest.skip("the kernel extension is not built")
    told = f"the kernels `{name}` have no products of bfloat16"
    with kernels_of(name), pytest.raises(OptionError, match=told):
        load(bundles[0], **ON)


def test_options_that_do_not_fit_are_refused(bundles: tuple[Path, ...]) -> None:
    with pytest.raises(OptionError, match="an accelerator reads the activations of experts as float32"):
        load(bundles[0], accelerator="torch-cpu", accelerator_memory="1MiB", **ON)
    with pytest.raises(OptionError, match="is not a type"):
        RuntimeOptions(lossy="expert-activations float16")


def test_it_is_off_by_default_and_in_exact_options() -> None:
    assert RuntimeOptions().modes.is_exact
    on = RuntimeOptions(lossy=ON["lossy"])
    assert not on.modes.is_exact and not on.modes.decides and on.modes.to_text() == "expert-activations bfloat16"
    assert on.exact() == RuntimeOptions()
