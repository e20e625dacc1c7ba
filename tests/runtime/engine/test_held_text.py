"""A conversation computes only what is new, and its logits are those of a run that computes everything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.manifests.errors import ExecutionError, StorageReadFailed
from moec.runtime import load
from moec.runtime.engine.engine import Engine
from moec.runtime.engine.held_text import HeldText
from moec.runtime.text.sampling import SamplingOptions

FIRST, SECOND, OTHER = [5, 9, 7, 3, 8, 2, 11], [4, 6, 10, 12], [5, 9, 7, 30, 31, 32, 33, 34]
SEED = 1
"""No answer of this seed ends before its limit."""


class Watched:
    """Records the tokens that an engine computes, and the logits that it samples from."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computed = list[int]()
        self.logits = list[np.ndarray]()
        forward, logits = engine.model.forward, engine.model.logits

        def watched_forward(tokens: np.ndarray, *rest: Any, **options: Any) -> np.ndarray:
            self.computed.append(len(tokens))
            return forward(tokens, *rest, **options)

        def watched_logits(hidden: np.ndarray) -> np.ndarray:
            found = logits(hidden)
            self.logits.append(found.copy())
            return found

        monkeypatch.setattr(engine.model, "forward", watched_forward)
        monkeypatch.setattr(engine.model, "logits", watched_logits)


def answer(engine: Engine, tokens: Sequence[int], held: HeldText | None, count: int = 5) -> list[int]:
    sampling = SamplingOptions(temperature=1.0, seed=SEED)
    return [step.token_id for step in engine.generate(tokens, count, sampling, held=held)]


@pytest.mark.parametrize("options", [{"expert_cache": "40%"}, {"kv": "float16"}, {}])
def test_a_conversation_is_bit_equal_to_runs_without_reuse(
    tiny_bundle: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[bool, tuple[list[list[int]], list[np.ndarray], list[int]]] = {}
    for is_held in (True, False):
        held = HeldText() if is_held else None
        with load(tiny_bundle, context=64, **options) as engine:
            watched, text, answers = Watched(engine, monkeypatch), list(FIRST), list[list[int]]()
            for _ in range(3):
                answers.append(answer(engine, text, held))
                text += [*answers[-1], *SECOND]
            found[is_held] = answers, watched.logits, watched.computed
    assert found[True][0] == found[False][0]
    for mine, whole in zip(found[True][1], found[False][1], strict=True):
        assert np.array_equal(mine.view(np.uint32), whole.view(np.uint32))
    firsts = [count for count in found[True][2] if count > 1]
    assert firsts == [len(FIRST), len(SECOND) + 1, len(SECOND) + 1], "the last token of an answer was not computed yet"
    assert [count for count in found[False][2] if count > 1] == [7, 16, 25]


def test_a_prompt_that_differs_is_computed_from_there(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(tiny_bundle, context=64) as engine:
        alone = answer(engine, OTHER, None)
        held, watched = HeldText(), Watched(engine, monkeypatch)
        answer(engine, FIRST, held)
        assert answer(engine, OTHER, held) == alone
        assert held.reused == 3 and watched.computed[5] == len(OTHER) - 3
        assert held.tokens == [*OTHER, *alone[:-1]]
        assert answer(engine, OTHER, held) == alone and held.reused == len(OTHER) - 1, "one token gives the logits"
        assert answer(engine, OTHER[:4], held) == answer(engine, OTHER[:4], None), "a shorter prompt"


def test_nothing_is_reused_after_another_use(tiny_bundle: Path) -> None:
    held = HeldText()
    with load(tiny_bundle, context=64) as engine:
        alone = answer(engine, FIRST, held)
        engine.logits(OTHER)
        assert answer(engine, FIRST, held) == alone and held.reused == 0
        assert answer(engine, FIRST, held) == alone and held.reused == len(FIRST) - 1
    with load(tiny_bundle, context=64) as second:
        assert answer(second, FIRST, held) == alone and held.reused == 0, "another engine has other keys and values"


def test_a_stopped_answer_keeps_what_it_computed(tiny_bundle: Path) -> None:
    held = HeldText()
    with load(tiny_bundle, context=64) as engine:
        alone = answer(engine, FIRST, None)
        steps = engine.generate(FIRST, 5, SamplingOptions(temperature=1.0, seed=SEED), held=held)
        shown = [next(steps).token_id, next(steps).token_id]
        held.stop()
        assert list(steps) == [] and shown == alone[:2]
        assert held.tokens == [*FIRST, alone[0]]
        assert answer(engine, FIRST, held) == alone and held.reused == len(FIRST) - 1


def test_a_long_prompt_can_be_stopped_between_passes(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.runtime.engine.held_text.MAX_PASS_TOKENS", 8)
    prompt = [3 + at % 40 for at in range(20)]
    held = HeldText()
    with load(tiny_bundle, context=64) as engine:
        forward = engine.model.forward

        def stopping(*arguments: Any, **options: Any) -> np.ndarray:
            held.stop()
            return forward(*arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(engine.model, "forward", stopping)
            assert list(engine.generate(prompt, 3, held=held)) == []
        assert held.tokens == prompt[:8]
        steps = list(engine.generate(prompt, 3, held=held))
        assert held.reused == 8
        assert [step.token_id for step in steps] == [step.token_id for step in engine.generate(prompt, 3)]


def test_what_a_failed_pass_wrote_is_not_held(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldText()
    with load(tiny_bundle, context=64) as engine:
        alone = answer(engine, FIRST, held)

        def failing(*arguments: Any, **options: Any) -> np.ndarray:
            raise StorageReadFailed("a sector cannot be read")

        with monkeypatch.context() as patched, pytest.raises(StorageReadFailed):
            patched.setattr(engine.model, "forward", failing)
            answer(engine, OTHER, held)
        assert held.tokens == OTHER[:3]
        assert answer(engine, FIRST, held) == alone and held.reused == 3


def test_a_lossy_run_computes_every_prompt(tiny_bundle: Path) -> None:
    held = HeldText()
    with load(tiny_bundle, context=64, expert_cache="40%", lossy="cache-routing margin=0.2,drop=0.1") as engine:
        assert not engine.is_lossless
        answer(engine, FIRST, held)
        answer(engine, FIRST, held)
        assert held.reused == 0


def test_two_conversations_take_turns(tiny_bundle: Path) -> None:
    first, second = HeldText(), HeldText()
    with load(tiny_bundle, context=64) as engine:
        steps = engine.generate(FIRST, 5, held=first)
        next(steps)
        answer(engine, OTHER, second)
        with pytest.raises(ExecutionError, match="has taken over"):
            next(steps)
        assert first.tokens == FIRST
        assert answer(engine, FIRST, first) == answer(engine, FIRST, None) and first.reused == 0
