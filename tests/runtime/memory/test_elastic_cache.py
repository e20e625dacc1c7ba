"""The expert cache takes what keys, values and working memory do not use yet, and gives it back before they do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moec.profiles.memory_floor import pass_bytes
from moec.runtime import load
from moec.runtime.engine.engine import Engine
from moec.runtime.memory import budget
from moec.runtime.storage.mapped_storage import resident_bytes
from tests.gates.bundles import emit_bundle
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

CONTEXT = 128
TOKENS = [int(token) for token in np.random.default_rng(3).integers(3, 259, CONTEXT)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More experts than keys, values and working memory could ever make room for."""
    root = tmp_path_factory.mktemp("elastic")
    return emit_bundle(save_tiny_mixtral(root / "model", TinyMixtral(experts=48, seed=5)), root / "bundle")


@pytest.fixture
def engine(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose budget leaves memory for a quarter of the experts."""
    own = budget.plan_memory

    def small(manifest, options, accelerator_bytes=0):  # type: ignore[no-untyped-def]
        return replace(own(manifest, options, accelerator_bytes), cache_bytes=manifest.cost.expert_padded_bytes // 4)

    monkeypatch.setattr("moec.runtime.engine.open_engine.plan_memory", small)
    return load(bundle, memory="100GB", context=CONTEXT)  # whatever the process of the tests holds


def test_the_cache_is_large_beside_a_short_sequence_and_small_beside_a_long_pass(engine: Engine) -> None:
    with engine:
        plan, total = engine.memory, engine.bundle.manifest.cost.expert_padded_bytes
        model = engine.bundle.manifest.model
        unused = pass_bytes(model, CONTEXT) - pass_bytes(model, 1) + plan.kv_bytes
        engine.step(TOKENS[:1], [0], [0])
        short = engine.cache.capacity_bytes
        assert plan.cache_bytes < short < min(total, plan.cache_bytes + unused)
        assert engine.decoding_cache_bytes(1) == short
        engine.step(TOKENS, [0] * CONTEXT, range(CONTEXT))
        after = engine.cache.capacity_bytes
        engine.cache.check_invariants()
        assert plan.cache_bytes < after == engine.decoding_cache_bytes(CONTEXT) < short


def test_during_the_longest_pass_over_a_full_context_it_has_its_planned_size(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    own = engine.model.forward

    def forward(*arguments):  # type: ignore[no-untyped-def]
        seen.append(engine.cache.capacity_bytes)
        return own(*arguments)

    monkeypatch.setattr(engine.model, "forward", forward)
    with engine:
        engine.step(TOKENS, [0] * CONTEXT, range(CONTEXT))
        assert seen == [engine.memory.cache_bytes]


def test_what_no_longer_fits_is_evicted_and_given_back(engine: Engine) -> None:
    with engine:
        for position in range(6):
            engine.step([TOKENS[position]], [0], [position])
        engine.cache.finish_warming()
        assert engine.cache.used_bytes > engine.memory.cache_bytes
        engine.cache.resize(engine.memory.cache_bytes)
        engine.cache.check_invariants()
        assert engine.cache.used_bytes <= engine.memory.cache_bytes
        arena = engine.storage.arena.view  # type: ignore[attr-defined]
        assert 0 < resident_bytes(arena) <= engine.memory.cache_bytes or resident_bytes(arena) == -1


@pytest.mark.gate("G1")
def test_it_changes_no_bit(bundle: Path, engine: Engine) -> None:
    with load(bundle, expert_cache="100%", context=CONTEXT) as whole:
        expected = whole.logits(TOKENS)
    with engine:
        first = np.concatenate([engine.logits(TOKENS[:40])[:1], engine.logits(TOKENS)[1:]])
        assert np.array_equal(first, expected)
        steps = [engine.model.logits(engine.step([t], [0], [p]))[0] for p, t in enumerate(TOKENS[:20])]
        assert np.array_equal(np.stack(steps), expected[:20])


def test_a_cache_of_a_given_size_stays(bundle: Path) -> None:
    with load(bundle, expert_cache="50%", context=CONTEXT) as fixed:
        before = fixed.cache.capacity_bytes
        fixed.step(TOKENS, [0] * CONTEXT, range(CONTEXT))
        fixed.step(TOKENS[:1], [0], [0])
        assert fixed.cache.capacity_bytes == before
