"""A text that begins as one in a slot computes only what is new, with the logits of a run that computes everything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.manifests.errors import ExecutionError, StorageReadFailed
from moec.runtime import load
from moec.runtime.engine.continuations import score_continuations
from moec.runtime.engine.engine import Engine, GenerationStep
from moec.runtime.text.sampling import SamplingOptions

FIRST, SECOND, OTHER = [5, 9, 7, 3, 8, 2, 11], [4, 6, 10, 12], [5, 9, 7, 30, 31, 32, 33, 34]
SAMPLING = SamplingOptions(temperature=1.0, seed=1)
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
            rows = logits(hidden)
            self.logits.append(rows.copy())
            return rows

        monkeypatch.setattr(engine.model, "forward", watched_forward)
        monkeypatch.setattr(engine.model, "logits", watched_logits)


def generated(engine: Engine, tokens: Sequence[int], reuses_prefix: bool = True) -> list[GenerationStep]:
    return list(engine.generate(tokens, 5, SAMPLING, reuses_prefix=reuses_prefix))


def answer(engine: Engine, tokens: Sequence[int], reused: int) -> list[int]:
    """Return an answer that did not compute so many tokens of its prompt."""
    steps = generated(engine, tokens)
    assert {step.reused_tokens for step in steps} == {reused}
    return [step.token_id for step in steps]


@pytest.fixture(scope="module")
def alone(tiny_bundle: Path) -> dict[int, list[int]]:
    """Answers to prompts, by their length, each computed as a whole."""
    with load(tiny_bundle, context=64) as engine:
        prompts = FIRST, OTHER, OTHER[:4]
        return {len(prompt): [step.token_id for step in generated(engine, prompt, False)] for prompt in prompts}


@pytest.mark.parametrize("options", [{"expert_cache": "40%"}, {"kv": "float16"}, {}])
def test_a_conversation_is_bit_equal_to_runs_without_reuse(
    tiny_bundle: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: dict[bool, tuple[list[list[int]], list[np.ndarray], list[int]]] = {}
    for reuses_prefix in (True, False):
        with load(tiny_bundle, context=64, **options) as engine:
            watched, text, answers = Watched(engine, monkeypatch), list(FIRST), list[list[int]]()
            for _ in range(3):
                answers.append([step.token_id for step in generated(engine, text, reuses_prefix)])
                text += [*answers[-1], *SECOND]
            runs[reuses_prefix] = answers, watched.logits, watched.computed
    assert runs[True][0] == runs[False][0]
    for mine, whole in zip(runs[True][1], runs[False][1], strict=True):
        assert np.array_equal(mine.view(np.uint32), whole.view(np.uint32))
    firsts = [count for count in runs[True][2] if count > 1]
    assert firsts == [len(FIRST), len(SECOND) + 1, len(SECOND) + 1], "the last token of an answer was not computed yet"
    assert [count for count in runs[False][2] if count > 1] == [7, 16, 25]


def test_a_prompt_that_differs_is_computed_from_there(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, alone: dict[int, list[int]]
) -> None:
    with load(tiny_bundle, context=64) as engine:
        watched = Watched(engine, monkeypatch)
        answer(engine, FIRST, 0)
        assert answer(engine, OTHER, 3) == alone[len(OTHER)]
        assert watched.computed[5] == len(OTHER) - 3
        assert engine.slots.slots[0].tokens == [*OTHER, *alone[len(OTHER)][:-1]]
        assert answer(engine, OTHER, len(OTHER) - 1) == alone[len(OTHER)], "one token gives the logits"
        assert answer(engine, OTHER[:4], 3) == alone[4], "a shorter prompt"


def test_nothing_is_reused_after_another_use(tiny_bundle: Path, alone: dict[int, list[int]]) -> None:
    with load(tiny_bundle, context=64) as engine:
        answer(engine, FIRST, 0)
        engine.logits(OTHER)
        assert answer(engine, FIRST, 0) == alone[len(FIRST)]
        engine.place_dense(on_device=False)
        assert answer(engine, FIRST, 0) == alone[len(FIRST)], "other keys and values"
        assert answer(engine, FIRST, len(FIRST) - 1) == alone[len(FIRST)]


def test_a_stopped_answer_keeps_what_it_computed(tiny_bundle: Path, alone: dict[int, list[int]]) -> None:
    with load(tiny_bundle, context=64) as engine:
        shown = list[int]()
        steps = engine.generate(FIRST, 5, SAMPLING, reuses_prefix=True, is_stopped=lambda: len(shown) == 2)
        shown += (next(steps).token_id, next(steps).token_id)
        assert list(steps) == [] and shown == alone[len(FIRST)][:2]
        assert engine.slots.slots[0].tokens == [*FIRST, shown[0]]
        assert answer(engine, FIRST, len(FIRST) - 1) == alone[len(FIRST)]


def test_a_long_prompt_can_be_stopped_between_passes(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.runtime.engine.engine.MAX_PASS_TOKENS", 8)
    prompt = [3 + at % 40 for at in range(20)]
    with load(tiny_bundle, context=64) as engine:
        watched = Watched(engine, monkeypatch)
        stopped = engine.generate(prompt, 3, reuses_prefix=True, is_stopped=lambda: bool(watched.computed))
        assert list(stopped) == [] and engine.slots.slots[0].tokens == prompt[:8]
        tokens = answer(engine, prompt, 8)
        assert tokens == [step.token_id for step in generated(engine, prompt, False)]


def test_what_a_failed_pass_wrote_is_not_reused(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, alone: dict[int, list[int]]
) -> None:
    with load(tiny_bundle, context=64) as engine:
        answer(engine, FIRST, 0)

        def failing(*arguments: Any, **options: Any) -> np.ndarray:
            raise StorageReadFailed("a sector cannot be read")

        with monkeypatch.context() as patched, pytest.raises(StorageReadFailed):
            patched.setattr(engine.model, "forward", failing)
            generated(engine, OTHER)
        assert engine.slots.slots[0].tokens == OTHER[:3]
        assert answer(engine, FIRST, 3) == alone[len(FIRST)]


def test_what_an_interrupted_copy_wrote_is_not_reused(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, alone: dict[int, list[int]]
) -> None:
    with load(tiny_bundle, context=64, slots=2) as engine:
        answer(engine, FIRST, 0)
        answer(engine, SECOND, 0)
        source, target = engine.slots.slots

        def interrupted(parents: Sequence[int], positions: int) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(engine.kv, "copy_slots", interrupted)
            engine.copy_prefix(source, target, 3)
        assert target.tokens == [] and source.tokens[: len(FIRST)] == FIRST
        assert answer(engine, OTHER, 3) == alone[len(OTHER)]


def test_a_lossy_run_computes_every_prompt(tiny_bundle: Path) -> None:
    with load(tiny_bundle, context=64, expert_cache="40%", lossy="cache-routing margin=0.2,drop=0.1") as engine:
        assert not engine.is_exact
        answer(engine, FIRST, 0)
        answer(engine, FIRST, 0)


def test_two_conversations_take_turns(tiny_bundle: Path, alone: dict[int, list[int]]) -> None:
    with load(tiny_bundle, context=64) as engine:
        steps = engine.generate(FIRST, 5, SAMPLING, reuses_prefix=True)
        next(steps)
        answer(engine, OTHER, 3)
        with pytest.raises(ExecutionError, match="has taken over"):
            next(steps)
        assert answer(engine, FIRST, 3) == alone[len(FIRST)]


def test_each_conversation_has_a_slot_while_there_are_slots(tiny_bundle: Path, alone: dict[int, list[int]]) -> None:
    """The second conversation begins with less than half of what the first slot holds, so this part is copied."""
    with load(tiny_bundle, context=64, slots=2) as engine:
        for reused in ((0, 3), (len(FIRST) - 1, len(OTHER) - 1)):
            assert answer(engine, FIRST, reused[0]) == alone[len(FIRST)]
            assert answer(engine, OTHER, reused[1]) == alone[len(OTHER)]
        assert [slot.tokens[:8] for slot in engine.slots.slots] == [[*FIRST, alone[len(FIRST)][0]], OTHER]
        generated(engine, OTHER, reuses_prefix=False)
        assert [slot.tokens[:8] for slot in engine.slots.slots] == [OTHER, []], "without reuse the first slot is used"


def test_a_failed_group_of_continuations_leaves_all_slots_free(tiny_bundle: Path) -> None:
    with load(tiny_bundle, context=64, slots=2) as engine:
        for _ in range(3):
            with pytest.raises(Exception, match="exceed"):
                list(score_continuations(engine, [(FIRST, [SECOND]), (OTHER, [SECOND * 20])]))
        (scores,) = score_continuations(engine, [(FIRST, [SECOND, SECOND])])
        assert len(scores) == 2
