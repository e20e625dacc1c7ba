"""G1, G2, G3: cache size, policy, I/O mode, threads and prefetch never change a bit of a logit.

Each run also proves that its options took effect: by its `mode:` line, by the operating system, or by a replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.runtime import RuntimeOptions, kernels, load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.expert_cache.cache_stats import CacheStats
from moec.runtime.options.runtime import POLICIES
from tests.gates.bundles import emit_bundle
from tests.gates.damage import write_tables
from tests.observed_runs import Workers, begin_trace, check_took_effect, counts, forget_mappings, replayed, threads
from tests.runtime.cache_kinds import Kind, both_caches, caches_of
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

TOKENS = np.random.default_rng(3).integers(4, 260, 60).tolist()
PREFILL = 40
LAYERS, EXPERTS, TOP_K = 4, 8, 4
# A thread is added for every 500,000 operations, so one expert of these widths has work for three threads.
WIDE = TinyMixtral(layers=2, experts=4, top_k=2, hidden_size=384, width=704, seed=12)
MOST_THREADS = 3


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with tables of a calibration with random experts, which some policies and prefetchers use."""
    root, draw = tmp_path_factory.mktemp("exact"), np.random.default_rng(5)
    shape = TinyMixtral(layers=LAYERS, experts=EXPERTS, top_k=TOP_K, seed=11)
    target = emit_bundle(save_tiny_mixtral(root / "model", shape), root / "bundle", mixed=True)
    popularity = draw.integers(1, 99, (LAYERS, EXPERTS)).astype(np.uint32)
    transitions = draw.integers(1, 99, (LAYERS - 1, EXPERTS, EXPERTS)).astype(np.uint32)
    write_tables(target, popularity=popularity, transitions=transitions)
    return target


@dataclass(frozen=True)
class Run:
    """A run.

    stats: statistics of the cache.
    by_policy: counts of a replay of the same requests under each policy, without prefetch.
    advice: experts read ahead in each layer of each pass.
    workers: threads of kernels, without the calling thread.
    """

    logits: np.ndarray
    stats: CacheStats
    by_policy: dict[str, dict[str, int]]
    advice: tuple[tuple[tuple[int, ...], ...], ...]
    workers: Workers


def run(bundle: Path, **options: Any) -> Run:
    """Do a prefill and 20 decode steps, and check that the options take effect."""
    forget_mappings(bundle)
    before = threads()
    with load(bundle, context=128, **options) as engine:
        engine.cache.finish_warming()
        tracer = begin_trace(engine)
        rows = [engine.logits(TOKENS[:PREFILL])]
        workers = Workers(before)
        for position in range(PREFILL, len(TOKENS)):
            rows.append(engine.model.logits(engine.step([TOKENS[position]], [0], [position])))
        tracer.end()
        check_took_effect(engine, RuntimeOptions(context=128, **options))
        engine.cache.check_invariants()
        weights = options.get("policy_weights")
        by_policy = {policy: counts(replayed(engine, tracer, policy)) for policy in POLICIES}
        if weights is not None:
            by_policy["weighted"] = counts(replayed(engine, tracer, options["policy"], weights))
        advice = tuple(each.advice for each in tracer.passes)
        return Run(np.concatenate(rows), engine.cache.stats, by_policy, advice, workers)


def check_equal(found: Run, expected: np.ndarray) -> None:
    assert np.array_equal(found.logits.view(np.uint32), expected.view(np.uint32))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wide")
    return emit_bundle(save_tiny_mixtral(root / "model", WIDE), root / "bundle", mixed=True)


@pytest.fixture(scope="module")
def resident_wide(wide: Path) -> np.ndarray:
    return run(wide, expert_cache="100%", prefetch="off", threads=1).logits


@pytest.fixture(scope="module")
def resident(bundle: Path) -> np.ndarray:
    found = run(bundle, expert_cache="100%", prefetch="off", threads=1)
    assert found.stats.misses == 0 and found.stats.evictions == 0 and len(found.workers) == 0
    return found.logits


@pytest.mark.gate("G1")
def test_smallest_cache_equals_resident(bundle: Path, resident: np.ndarray) -> None:
    smallest = str(open_bundle(bundle).manifest.cost.minimum_expert_bytes)
    found = run(bundle, expert_cache=smallest, prefetch="off", threads=1)
    assert found.stats.evictions > 0 and found.stats.rereads > 0
    check_equal(found, resident)


@pytest.mark.gate("G2")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("share", ["30%", "60%"])
def test_cache_and_policy_change_nothing(bundle: Path, resident: np.ndarray, policy: str, share: str) -> None:
    """The cache counts equal those of a replay with this policy, and of no other policy."""
    found = run(bundle, expert_cache=share, policy=policy, prefetch="off")
    assert found.stats.evictions > 0
    assert counts(found.stats) == found.by_policy[policy]
    assert [name for name, each in found.by_policy.items() if each == found.by_policy[policy]] == [policy]
    check_equal(found, resident)


@pytest.mark.gate("G2")
@pytest.mark.parametrize("policy", ["hobbit", "hobbit-printed"])
def test_weights_of_a_policy_change_nothing(bundle: Path, resident: np.ndarray, policy: str) -> None:
    found = run(bundle, expert_cache="40%", policy=policy, policy_weights="0,0,0,1", prefetch="off")
    assert counts(found.stats) == found.by_policy["weighted"] != found.by_policy[policy]
    check_equal(found, resident)


@pytest.mark.gate("G2")
@pytest.mark.parametrize("io", ["direct", "buffered", "mmap"])
@pytest.mark.parametrize("threads", range(1, MOST_THREADS + 1))
def test_io_and_threads_change_nothing(wide: Path, resident_wide: np.ndarray, io: str, threads: int) -> None:
    """`run` gets the modes of open files and the number of threads from the operating system."""
    found = run(wide, expert_cache="60%", io=io, threads=threads, prefetch="off")
    assert found.stats.evictions > 0
    assert len(found.workers) == (0 if kernels.compiled() is None else threads - 1)
    found.workers.check_woken()
    check_equal(found, resident_wide)


@pytest.mark.gate("G2")
@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("policy", ["lrfu", "edgemoe"])
@both_caches
def test_readers_change_nothing(bundle: Path, resident: np.ndarray, readers: int, policy: str, kind: Kind) -> None:
    with caches_of(kind):
        found = run(bundle, expert_cache="40%", readers=readers, policy=policy, prefetch="off")
    assert counts(found.stats) == found.by_policy[policy]
    check_equal(found, resident)


PREFETCHERS = [(prefetch, rule) for prefetch in ("lookahead", "path", "popularity") for rule in ("likely", "spread")]


@pytest.fixture(scope="module")
def advised(bundle: Path) -> dict[tuple[str, str], Run]:
    return {
        (name, rule): run(bundle, expert_cache="60%", prefetch=name, prefetch_rule=rule) for name, rule in PREFETCHERS
    }


@pytest.mark.gate("G3")
@pytest.mark.parametrize("prefetch", PREFETCHERS)
def test_prefetch_changes_nothing(
    advised: dict[tuple[str, str], Run], resident: np.ndarray, prefetch: tuple[str, str]
) -> None:
    """Prefetched experts are used. Their time of arrival depends on the storage."""
    found = advised[prefetch]
    assert found.stats.prefetch_used > 0
    check_equal(found, resident)


@pytest.mark.gate("G3")
def test_every_prefetcher_and_rule_reads_something_else_ahead(advised: dict[tuple[str, str], Run]) -> None:
    for one, other in combinations(PREFETCHERS, 2):
        assert advised[one].advice != advised[other].advice, (one, other)


@pytest.mark.gate("G3")
@pytest.mark.parametrize(
    ("rule", "options"),
    [("spread", {"prefetch_layers": 1}), ("likely", {"prefetch_layers": 3}), ("spread", {"prefetch_experts": 3})],
)
def test_how_far_and_how_much_is_read_ahead_changes_nothing(
    bundle: Path, advised: dict[tuple[str, str], Run], resident: np.ndarray, rule: str, options: dict[str, int]
) -> None:
    found = run(bundle, expert_cache="60%", prefetch_rule=rule, **options)
    assert found.advice != advised["lookahead", rule].advice
    assert found.stats.prefetch_used > 0
    check_equal(found, resident)


@pytest.mark.gate("G3")
@pytest.mark.parametrize("layers", [1, 3])
def test_looking_ahead_to_the_first_miss_changes_nothing(bundle: Path, resident: np.ndarray, layers: int) -> None:
    found = run(bundle, expert_cache="60%", prefetch_rule="first-miss", prefetch_layers=layers)
    assert found.stats.prefetch_used > 0
    check_equal(found, resident)


@pytest.mark.gate("G2")
def test_batch_composition_changes_nothing(bundle: Path, resident: np.ndarray) -> None:
    """Two sequences interleaved in one flat batch give the same rows as each alone."""
    with load(bundle, context=128, expert_cache="50%", slots=2) as engine:
        tokens = [*TOKENS[:20], *TOKENS[:PREFILL]]
        slots, positions = [1] * 20 + [0] * PREFILL, [*range(20), *range(PREFILL)]
        found = engine.model.logits(engine.step(tokens, slots, positions))
    assert np.array_equal(found[:20].view(np.uint32), resident[:20].view(np.uint32))
    assert np.array_equal(found[20:].view(np.uint32), resident[:PREFILL].view(np.uint32))
