"""Many sequences side by side give, token for token, what each gives alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moec.manifests.errors import ContextOverflow, InputError
from moec.runtime import Engine, load
from moec.runtime.engine import batch
from moec.runtime.engine import engine as engine_module
from moec.runtime.engine.batch import forced_logits, generate_many

CONTEXT, VOCABULARY = 96, 288
PROMPT_LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 60)


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[Engine]:
    with load(tiny_bundle, expert_cache="60%", context=CONTEXT, slots=3) as opened:
        yield opened


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = np.random.default_rng(2)
    return [generator.integers(4, VOCABULARY, length).tolist() for length in PROMPT_LENGTHS]


LIMITS = [8, 1, 6, 2, 8, 3, 5, 8, 4, 8, 7]


@pytest.fixture(scope="module")
def alone(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Decoded one by one, token by token."""
    return [
        [step.token_id for step in engine.generate(prompt, max_new_tokens=limit)]
        for prompt, limit in zip(prompts, LIMITS, strict=True)
    ]


@pytest.fixture
def pass_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (batch, engine_module):
        monkeypatch.setattr(module, "MAX_PASS_TOKENS", request.param)
    return int(request.param)


def wrong_at(answer: list[int], place: int) -> list[int]:
    """The answer with another token at one place, if it has that place."""
    return [(token + (index == place)) % VOCABULARY for index, token in enumerate(answer)]


DRAFTS: dict[str, Callable[[int, list[int]], list[int]]] = {
    "none": lambda index, answer: [],
    "right": lambda index, answer: answer,
    "right and longer than the limit": lambda index, answer: [*answer, 9, 9, 9, 9],
    "far too long": lambda index, answer: [*answer, *[9] * 200],
    "wrong from the start": lambda index, answer: wrong_at(answer, 0),
    "wrong in the middle": lambda index, answer: wrong_at(answer, 2),
    "wrong at every place": lambda index, answer: wrong_at(answer, index % 8),
    "half": lambda index, answer: answer[: len(answer) // 2],
}


def drafts_of(kind: str, alone: list[list[int]]) -> list[list[int]]:
    return [DRAFTS[kind](index, answer) for index, answer in enumerate(alone)]


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("pass_tokens", [5, 16, 1024], indirect=True)
def test_equal_to_one_by_one(
    engine: Engine, prompts: list[list[int]], alone: list[list[int]], kind: str, pass_tokens: int
) -> None:
    taken: list[tuple[int, list[int]]] = []
    found = generate_many(engine, prompts, drafts_of(kind, alone), LIMITS, lambda *answer: taken.append(answer))
    assert found == alone
    assert sorted(taken) == list(enumerate(alone)), "each answer is handed over once"
    engine.cache.check_invariants()


@pytest.mark.parametrize("pass_tokens", [3, 7, 1024], indirect=True)
def test_every_place_of_a_first_disagreement(
    engine: Engine, prompts: list[list[int]], alone: list[list[int]], pass_tokens: int
) -> None:
    """A pass may end right after the disagreement. Then the next pass was computed from the wrong token."""
    for prompt, answer, limit in list(zip(prompts, alone, LIMITS, strict=True))[:5:2]:
        drafts = [wrong_at(answer, place) for place in range(len(answer))]
        found = generate_many(engine, [prompt] * len(drafts), drafts, [limit] * len(drafts))
        assert found == [answer] * len(drafts)


@pytest.mark.parametrize("pass_tokens", [3, 16, 1024], indirect=True)
def test_eos_ends_an_answer_and_is_left_out(
    engine: Engine,
    prompts: list[list[int]],
    alone: list[list[int]],
    pass_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eos = alone[0][3]
    manifest = engine.bundle.manifest
    ending = replace(manifest, model=replace(manifest.model, eos_token_ids=(eos,)))
    monkeypatch.setattr(engine, "bundle", replace(engine.bundle, manifest=ending))
    expected = [answer[: answer.index(eos)] if eos in answer else answer for answer in alone]
    assert expected != alone
    for kind in ("none", "right", "wrong at every place", "far too long"):
        assert generate_many(engine, prompts, drafts_of(kind, alone), LIMITS) == expected
    steps = list(engine.generate(prompts[0], max_new_tokens=8))
    assert [step.token_id for step in steps] == [*expected[0], eos]
    assert (steps[-1].finish_reason, steps[-1].text, steps[-2].finish_reason) == ("stop", "", None)


def test_the_context_ends_an_answer(engine: Engine) -> None:
    prompt = list(range(10, 10 + CONTEXT - 2))
    expected = [step.token_id for step in engine.generate(prompt, max_new_tokens=50)]
    assert len(expected) == 3
    drafts = [[], expected, [*expected, 5, 6], [5] * 99]
    assert generate_many(engine, [prompt] * 4, drafts, [50] * 4) == [expected] * 4
    full = list(range(10, 10 + CONTEXT))
    assert len(generate_many(engine, [full], [[5]], [50])[0]) == 1


@pytest.mark.parametrize("kind", ["none", "right", "wrong at every place", "far too long"])
def test_a_stop_text_ends_an_answer_with_its_token(
    engine: Engine, prompts: list[list[int]], alone: list[list[int]], kind: str
) -> None:
    """A text that the third token completes, whatever came before; one that never comes; none."""
    decode = engine.tokenizer.decode
    stops = [(decode(answer[1:3]), "nowhere") if index % 2 else () for index, answer in enumerate(alone)]
    expected = [
        next((answer[:end] for end in range(1, len(answer)) if any(s in decode(answer[:end]) for s in stop)), answer)
        for answer, stop in zip(alone, stops, strict=True)
    ]
    assert sum(map(len, expected)) < sum(map(len, alone))
    assert generate_many(engine, prompts, drafts_of(kind, alone), LIMITS, stops=stops) == expected


def test_nothing_to_do(engine: Engine) -> None:
    assert generate_many(engine, [], [], []) == []
    assert list(forced_logits(engine, [])) == []


def test_what_is_refused(engine: Engine) -> None:
    with pytest.raises(ContextOverflow, match=f"{CONTEXT + 1} tokens, the context holds {CONTEXT}"):
        generate_many(engine, [[5], [5] * (CONTEXT + 1)], [[], []], [1, 1])
    with pytest.raises(InputError, match="the prompt is empty"):
        generate_many(engine, [[]], [[]], [1])
    for prompt, draft in (([VOCABULARY], []), ([-1], []), ([5], [VOCABULARY]), ([5], [-1])):
        with pytest.raises(InputError, match="outside the vocabulary of 288"):
            generate_many(engine, [prompt], [draft], [9])
    with pytest.raises(ContextOverflow):
        list(forced_logits(engine, [([5] * CONTEXT, [6])]))


@pytest.mark.parametrize("pass_tokens", [5, 16, 1024], indirect=True)
def test_forced_logits_are_the_rows_of_the_whole(engine: Engine, prompts: list[list[int]], pass_tokens: int) -> None:
    generator = np.random.default_rng(4)
    lengths = [1 + index % 9 for index in range(len(prompts))]
    answers = [generator.integers(4, VOCABULARY, length).tolist() for length in lengths]
    pairs = list(zip(prompts, answers, strict=True))
    pairs.append(([], prompts[4]))
    pairs.append((prompts[4], []))
    found = list(forced_logits(engine, pairs))
    assert [index for index, _ in found] == list(range(len(pairs)))
    for (prompt, answer), (_, rows) in zip(pairs, found, strict=True):
        whole = engine.logits([*prompt, *answer])
        expected = whole[max(0, len(prompt) - 1) : -1]
        assert rows.shape == expected.shape and np.array_equal(rows.view(np.uint32), expected.view(np.uint32))


def test_short_texts_get_more_slots(engine: Engine, prompts: list[list[int]], alone: list[list[int]]) -> None:
    """The memory of keys and values is divided by the longest text, and is as before afterwards."""
    seen, step = set[int](), engine.step

    def noted(tokens: list[int], slots: list[int], positions: list[int]) -> np.ndarray:
        seen.update(slots)
        assert engine.kv.context == engine.memory.context == len(prompts[3]) + 8
        return np.asarray(step(tokens, slots, positions))

    short = [prompts[3]] * 12
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", noted)
        found = generate_many(engine, short, [[]] * 12, [8] * 12, divides=True)
    steps = engine.generate(prompts[3], max_new_tokens=8)
    assert found == [[step.token_id for step in steps]] * 12
    assert len(seen) == 12 > engine.options.slots == 3
    assert engine.kv.context == engine.memory.context == CONTEXT and len(engine.slots.slots) == 3
    assert generate_many(engine, prompts, [[]] * len(prompts), LIMITS, divides=True) == alone


@pytest.mark.parametrize("divides", [False, True])
def test_a_common_beginning_is_computed_once(engine: Engine, prompts: list[list[int]], divides: bool) -> None:
    beginning = prompts[-3]
    asked = [[*beginning, *prompt] for prompt in prompts[:8]]
    expected = [[step.token_id for step in engine.generate(prompt, max_new_tokens=8)] for prompt in asked]
    computed, step = list[int](), engine.step

    def noted(tokens: list[int], slots: list[int], positions: list[int]) -> np.ndarray:
        computed.extend(position for position in positions if position < len(beginning))
        return np.asarray(step(tokens, slots, positions))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", noted)
        assert generate_many(engine, asked, [[]] * 8, [8] * 8, divides=divides) == expected
    assert sorted(computed) == list(range(len(beginning)))


def test_drafts_that_are_wrong_are_left_out(
    engine: Engine, prompts: list[list[int]], alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cost a pass over all of their tokens. Right ones stay."""
    monkeypatch.setattr(batch, "JUDGED_TOKENS", 4)
    checked = dict[str, int]()
    for kind in ("wrong from the start", "right"):
        tokens, step = list[int](), engine.step

        def noted(some: list[int], *places: list[int]) -> np.ndarray:
            tokens.extend(some)  # noqa: B023
            return np.asarray(step(some, *places))  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(engine, "step", noted)
            assert generate_many(engine, prompts, drafts_of(kind, alone), LIMITS) == alone
        checked[kind] = len(tokens)
    least = sum(PROMPT_LENGTHS) + sum(len(answer) - 1 for answer in alone)  # each token of a text once
    assert checked["right"] == least
    wrong = sum(len(answer) - 1 for answer in alone)
    assert least < checked["wrong from the start"] < least + wrong
