"""Layers with sliding windows hold what later tokens see, and give the other memory back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.manifests.errors import ExecutionError
from moec.profiles import memory_floor
from moec.profiles.memory_floor import held_positions, kv_bytes
from moec.runtime import load
from moec.runtime.engine.batch import generate_many
from moec.runtime.engine.continuations import score_continuations
from moec.runtime.engine.engine import Engine
from moec.runtime.layers import window_positions
from moec.runtime.layers.kv_cache import KVCache
from moec.runtime.memory.elastic_cache import CacheBudget
from moec.serving.engine.saved_slots import file_bytes, slot_sizes
from tests.gates.bundles import emit_bundle
from tests.tiny_families import TinyFamily, save_tiny_family

WINDOW, STEP, CONTEXT = 8, 8, 512
"""A window and a step so small that pages are freed in a short context: a position of a head has 1 KiB."""
TEXT = np.random.default_rng(3).integers(4, 250, 400).tolist()
OTHER = np.random.default_rng(4).integers(4, 250, 400).tolist()
LARGE_HEADS = {
    "num_experts": 4, "head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_theta": None,
    "max_position_embeddings": 512, "sliding_window": WINDOW, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("windows")
    return emit_bundle(save_tiny_family(root / "model", TinyFamily("Mellum", LARGE_HEADS, seed=3)), root / "bundle")


@pytest.fixture(autouse=True)
def _small_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory_floor, window_positions):
        monkeypatch.setattr(module, "WINDOW_STEP", STEP)


def opened(bundle: Path, **options: Any) -> Engine:
    return load(bundle, context=CONTEXT, **options)


def whole(bundle: Path, tokens: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Return the logits of a run that frees nothing."""
    with monkeypatch.context() as patched:
        patched.setattr(KVCache, "frees_windows", False)
        with opened(bundle) as engine:
            assert engine.kv.windows is None
            return engine.logits(tokens)


def resident(engine: Engine, layer: int) -> int:
    """Return the positions of a layer whose keys are in memory: those of pages that are not zero."""
    keys = engine.kv.keys[layer][0, 0]
    return int((keys != 0).any(axis=1).sum())


def test_no_bit_changes_and_memory_is_given_back(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(bundle, TEXT, monkeypatch)
    with opened(bundle) as engine:
        assert engine.kv.windows is not None
        engine.begin_sequence()
        rows = [engine.model.logits(engine.step(TEXT[:100], [0] * 100, range(100)))]
        rows += [engine.decode([token], [0], [at]) for at, token in enumerate(TEXT[100:], 100)]
        assert np.array_equal(np.concatenate(rows).view(np.uint32), expected.view(np.uint32))
        page_positions = 4096 // engine.kv.keys[0].strides[2]
        assert resident(engine, 1) == len(TEXT)
        assert resident(engine, 0) <= WINDOW + STEP + 2 * page_positions


def answer(engine: Engine, prompt: list[int], reused: int) -> list[int]:
    steps = list(engine.generate(prompt, 6, reuses_prefix=True))
    assert {step.reused_tokens for step in steps} == {reused}
    return [step.token_id for step in steps]


def test_texts_go_on_where_their_windows_are(bundle: Path) -> None:
    def alone(prompt: list[int]) -> list[int]:
        with opened(bundle) as fresh:
            return [step.token_id for step in fresh.generate(prompt, 6)]

    with opened(bundle, slots=2) as engine:
        first = TEXT[:100]
        said = answer(engine, first, 0)
        following = first + said + OTHER[:30]
        assert answer(engine, following, len(first) + len(said) - 1) == alone(following)
        # Its end was written in another way: it goes on 16 tokens before it, where a window was kept.
        changed = following[:-3] + OTHER[50:60]
        assert answer(engine, changed, len(following) - 16) == alone(changed)
        parted = changed[:60] + OTHER[100:150]  # no window: computed as a whole, and kept there
        assert answer(engine, parted, 0) == alone(parted)
        again = changed[:60] + OTHER[200:240]
        assert answer(engine, again, 60) == alone(again)


def test_drafts_continuations_and_copies(bundle: Path) -> None:
    prompts = [TEXT[:60], TEXT[:60] + OTHER[:20], OTHER[:90]]
    with opened(bundle) as engine:
        expected = generate_many(engine, prompts, [()] * 3, [6] * 3)
    drafts = [[*tokens[:2], *OTHER[:30]] for tokens in expected]
    with opened(bundle, slots=2) as engine:
        assert generate_many(engine, prompts, drafts, [40] * 3)[0][:6] == expected[0]
    groups = [(TEXT[:50], [OTHER[at : at + 30] for at in range(4)])]
    with opened(bundle, slots=2) as engine:
        (together,) = score_continuations(engine, groups)
    for continuation, score in zip(groups[0][1], together, strict=True):
        with opened(bundle) as engine:
            ((apart,),) = score_continuations(engine, [(TEXT[:50], [continuation])])
            assert apart.log_prob == pytest.approx(score.log_prob, abs=1e-9) and apart.tokens == score.tokens


def test_a_place_that_was_left_is_refused(bundle: Path) -> None:
    with opened(bundle) as engine:
        engine.begin_sequence()
        engine.step(TEXT[:100], [0] * 100, range(100))
        engine.step(TEXT[99:100], [0], [99])  # the last token may run again
        with pytest.raises(ExecutionError, match="no state after 50 positions"):
            engine.step(TEXT[50:51], [0], [50])


def test_the_budget_counts_what_is_held(bundle: Path) -> None:
    with opened(bundle, slots=2) as engine:
        model = engine.model.spec
        held = [held_positions(model, attention, CONTEXT) for attention in model.attentions]
        assert held == [2 * WINDOW + STEP, CONTEXT, 2 * WINDOW + STEP]
        position_bytes = model.kv_bytes_per_position // 3
        expected = position_bytes * sum(2 * most + min(CONTEXT - most, 1024) for most in held)
        assert engine.memory.kv_bytes == kv_bytes(model, CONTEXT, 2) == expected
        budget = CacheBudget(engine.bundle.manifest, engine.memory, engine.options)
        more = budget.kv_bytes([400, 0], 100) - budget.kv_bytes([400, 0], 0)
        assert 0 < more <= 2 * position_bytes * (100 + 8)
        windows = engine.kv.windows
        assert windows is not None
        assert file_bytes(100, slot_sizes(engine)) - file_bytes(99, slot_sizes(engine)) == 4 + position_bytes
