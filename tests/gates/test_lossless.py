"""G1, G2, G3: cache size, policy, I/O mode, threads and prefetch never change a bit of a logit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.runtime import load
from moec.runtime.cache_statistics import CacheStats
from tests.gates.bundles import emit_bundle
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

TOKENS = np.random.default_rng(3).integers(4, 260, 60).tolist()
PREFILL = 40


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lossless")
    folder = save_tiny_mixtral(root / "model", TinyMixtral(layers=4, experts=8, top_k=2, seed=11))
    return emit_bundle(folder, root / "bundle", mixed=True)


def run(bundle: Path, **options: Any) -> tuple[np.ndarray, CacheStats]:
    """Logits of a prefill and of 20 decode steps, and what the cache did."""
    with load(bundle, context=128, **options) as engine:
        engine.cache.finish_warming()
        rows = [engine.logits(TOKENS[:PREFILL])]
        for position in range(PREFILL, len(TOKENS)):
            rows.append(engine.model.logits(engine.step([TOKENS[position]], [0], [position])))
        engine.cache.check_invariants()
        return np.concatenate(rows), engine.cache.stats


@pytest.fixture(scope="module")
def resident(bundle: Path) -> np.ndarray:
    logits, stats = run(bundle, expert_cache="100%", prefetch="off", threads=1)
    assert stats.misses == 0 and stats.evictions == 0
    return logits


def smallest(bundle: Path) -> str:
    from moec.runtime.bundle import open_bundle

    return str(open_bundle(bundle).manifest.cost.minimum_expert_bytes)


@pytest.mark.gate("G1")
def test_smallest_cache_equals_resident(bundle: Path, resident: np.ndarray) -> None:
    logits, stats = run(bundle, expert_cache=smallest(bundle), prefetch="off", threads=1)
    assert stats.evictions > 0 and stats.rereads > 0
    assert np.array_equal(logits.view(np.uint32), resident.view(np.uint32))


@pytest.mark.gate("G2")
@pytest.mark.parametrize("policy", ["lrfu", "edgemoe", "lru", "lfu", "hobbit", "hobbit-printed"])
@pytest.mark.parametrize("share", ["30%", "60%"])
def test_cache_and_policy_change_nothing(bundle: Path, resident: np.ndarray, policy: str, share: str) -> None:
    logits, stats = run(bundle, expert_cache=share, policy=policy, prefetch="off")
    assert stats.evictions > 0
    assert np.array_equal(logits.view(np.uint32), resident.view(np.uint32))


@pytest.mark.gate("G2")
@pytest.mark.parametrize("io", ["direct", "buffered", "mmap"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_io_and_threads_change_nothing(bundle: Path, resident: np.ndarray, io: str, threads: int) -> None:
    logits, stats = run(bundle, expert_cache="40%", io=io, threads=threads, prefetch="off")
    assert stats.evictions > 0
    assert np.array_equal(logits.view(np.uint32), resident.view(np.uint32))


@pytest.mark.gate("G3")
@pytest.mark.parametrize("prefetch", ["lookahead", "path", "popularity"])
@pytest.mark.parametrize("rule", ["likely", "spread"])
def test_prefetch_changes_nothing(bundle: Path, resident: np.ndarray, prefetch: str, rule: str) -> None:
    """What was read ahead is used; whether it arrives before its layer asks depends on the storage of the moment."""
    logits, stats = run(bundle, expert_cache="60%", prefetch=prefetch, prefetch_rule=rule)
    assert stats.prefetch_used > 0
    assert np.array_equal(logits.view(np.uint32), resident.view(np.uint32))


@pytest.mark.gate("G3")
@pytest.mark.parametrize("layers", [1, 3])
def test_looking_ahead_to_the_first_miss_changes_nothing(bundle: Path, resident: np.ndarray, layers: int) -> None:
    logits, stats = run(bundle, expert_cache="60%", prefetch_rule="first-miss", prefetch_layers=layers)
    assert stats.prefetch_used > 0
    assert np.array_equal(logits.view(np.uint32), resident.view(np.uint32))


@pytest.mark.gate("G2")
def test_batch_composition_changes_nothing(bundle: Path, resident: np.ndarray) -> None:
    """Two sequences interleaved in one flat batch give the rows that each gives alone."""
    with load(bundle, context=128, expert_cache="50%", slots=2) as engine:
        tokens = [*TOKENS[:20], *TOKENS[:PREFILL]]
        slots, positions = [1] * 20 + [0] * PREFILL, [*range(20), *range(PREFILL)]
        found = engine.model.logits(engine.step(tokens, slots, positions))
    assert np.array_equal(found[:20].view(np.uint32), resident[:20].view(np.uint32))
    assert np.array_equal(found[20:].view(np.uint32), resident[:PREFILL].view(np.uint32))
