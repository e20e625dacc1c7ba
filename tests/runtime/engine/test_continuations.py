"""Scores of continuations are those of whole passes, and a context is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from moec.manifests.errors import ContextOverflow, InputError
from moec.runtime import Engine, load
from moec.runtime.engine import batch, continuations
from moec.runtime.engine.batch import forced_logits
from moec.runtime.engine.continuations import Group, score_continuations

EXAMPLE = Path(__file__).parents[3] / "examples" / "bundle"
CONTEXT, VOCABULARY = 96, 1494
_random = np.random.default_rng(8)


def tokens(count: int) -> list[int]:
    return [int(token) for token in _random.integers(4, VOCABULARY, count)]


SHOTS = tokens(40)
"""A beginning that several contexts share."""
GROUPS: list[Group] = [
    ([*SHOTS, *tokens(20)], [tokens(1), tokens(5), tokens(9), [], tokens(2)]),
    ([*SHOTS, *tokens(18)], [tokens(3) for _ in range(7)]),
    ([*SHOTS, *tokens(3)], [tokens(1) for _ in range(4)]),
    (SHOTS, [tokens(4), tokens(57)]),
    (SHOTS[:9], [tokens(2), tokens(2)]),
    (tokens(1), [tokens(96), tokens(1)]),
    (tokens(30), [tokens(6)]),
]


@pytest.fixture(scope="module", params=[1, 2, 5], ids="{} slots".format)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with load(EXAMPLE, expert_cache="60%", context=CONTEXT, slots=request.param) as opened:
        yield opened


def whole_pass(engine: Engine, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    """Log probability and greediness from the logits of one pass over the whole text."""
    if not continuation:
        return 0.0, True
    logits = engine.logits([*context, *continuation][:-1])[len(context) - 1 :].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    rows = np.arange(len(continuation))
    is_greedy = bool((logits.argmax(axis=1) == np.array(continuation)).all())
    return float(log_probs[rows, continuation].sum()), is_greedy


def greedy_of(engine: Engine, context: Sequence[int], count: int) -> list[int]:
    return [step.token_id for step in engine.generate(context, count)]


@pytest.mark.parametrize("pass_tokens", [7, 64, 1024])
def test_scores_of_shared_contexts_are_those_of_whole_passes(
    engine: Engine, pass_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (continuations, batch):
        monkeypatch.setattr(module, "MAX_PASS_TOKENS", pass_tokens)
    found = list(score_continuations(engine, GROUPS))
    for (context, rest), scores in zip(GROUPS, found, strict=True):
        for continuation, score in zip(rest, scores, strict=True):
            expected, is_greedy = whole_pass(engine, context, continuation)
            assert score.log_prob == pytest.approx(expected, rel=1e-6)
            assert score.is_greedy == is_greedy
    engine.cache.check_invariants()


def test_greedy_continuations_are_told_apart(engine: Engine) -> None:
    likely = greedy_of(engine, SHOTS, 4)
    other = [*likely[:3], (likely[3] + 1) % VOCABULARY]
    (scores,) = score_continuations(engine, [(SHOTS, [likely, other, likely[:1], other[3:]])])
    assert [score.is_greedy for score in scores] == [True, False, True, other[3] == likely[0]]


def test_a_context_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of contexts that share a beginning, and of continuations but for their last token."""
    with load(EXAMPLE, context=CONTEXT, slots=4) as engine:
        computed: list[int] = []
        step = engine.step

        def counting(ids: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> np.ndarray:
            computed.append(len(ids))
            return step(ids, slots, positions)

        monkeypatch.setattr(engine, "step", counting)
        contexts = [[*SHOTS, *tokens(length)] for length in (8, 7, 6)]
        rest = [tokens(1), tokens(3), tokens(3), tokens(3)]
        list(score_continuations(engine, [(context, rest) for context in contexts]))
        assert sum(computed) == len(SHOTS) + 8 + 7 + 6 + 3 * 3 * 2
        assert computed[:2] == [len(SHOTS) + 8, 3 * 2]  # continuations stand side by side in the free slots


def test_groups_are_read_when_they_are_needed() -> None:
    read: list[int] = []

    def groups() -> Iterator[Group]:
        for index in range(50):
            read.append(index)
            yield tokens(20), [tokens(2)]

    with load(EXAMPLE, context=CONTEXT, slots=2) as engine:
        scores = score_continuations(engine, groups())
        next(scores)
        assert len(read) <= 4
        assert len(list(scores)) == 49


def test_another_use_of_the_engine_in_between_changes_nothing() -> None:
    groups = [([*SHOTS, token], [tokens(3)]) for token in (5, 6, 7)]
    with load(EXAMPLE, context=CONTEXT, slots=1) as engine:
        expected = [scores[0].log_prob for scores in score_continuations(engine, groups)]
        found = []
        for scores in score_continuations(engine, groups):
            found.append(scores[0].log_prob)
            engine.logits(tokens(60))
    assert found == expected


@pytest.mark.parametrize(
    "options", [{"lossy": "cache-routing margin=0.5"}, {"lossy": "big-little gamma=0.5,k=1"}], ids=str
)
def test_lossy_modes_decide_as_in_an_evaluation(options: dict[str, str]) -> None:
    context, rest = SHOTS, [tokens(5), tokens(2)]
    with load(EXAMPLE, expert_cache="40%", cache_state="cold", context=CONTEXT, slots=2, **options) as engine:
        (scores,) = score_continuations(engine, [(context, rest)])
    with load(EXAMPLE, expert_cache="40%", cache_state="cold", context=CONTEXT, slots=2, **options) as engine:
        logits = dict(forced_logits(engine, [(context, each) for each in rest]))
    assert [score.log_prob for score in scores] == pytest.approx(log_probs(logits, rest), rel=1e-6)


def test_an_encoder_reads_the_context(tmp_path: Path) -> None:
    from tests.gates.bundles import emit_bundle
    from tests.tiny_switch import TinySwitch, save_tiny_switch

    bundle = emit_bundle(save_tiny_switch(tmp_path / "model", TinySwitch(seed=4)), tmp_path / "bundle")
    shots, rest = [token % 200 + 4 for token in SHOTS], [[7, 9, 5, 6, 5], [8]]
    with load(bundle, context=CONTEXT, slots=2) as engine:
        (scores,) = score_continuations(engine, [(shots, rest)])
        logits = dict(forced_logits(engine, [(shots, each) for each in rest]))
    assert [score.log_prob for score in scores] == pytest.approx(log_probs(logits, rest), rel=1e-6)


def log_probs(logits: dict[int, np.ndarray], rest: Sequence[Sequence[int]]) -> list[float]:
    found = []
    for index, continuation in enumerate(rest):
        wide = logits[index].astype(np.float64)
        total = np.log(np.exp(wide).sum(axis=1))
        found.append(float((wide[np.arange(len(wide)), continuation] - total).sum()))
    return found


@pytest.mark.parametrize(
    ("group", "error"),
    [
        (([], [[5]]), InputError),
        (([1 << 20], [[5]]), InputError),
        (([5], [[-1]]), InputError),
        ((tokens(CONTEXT), [tokens(2)]), ContextOverflow),
        ((tokens(CONTEXT + 1), [tokens(1)]), ContextOverflow),
    ],
)
def test_what_cannot_be_scored_is_refused(engine: Engine, group: Group, error: type[Exception]) -> None:
    with pytest.raises(error):
        list(score_continuations(engine, [group]))
    (scores,) = score_continuations(engine, [(tokens(CONTEXT), [tokens(1)])])
    assert scores[0].log_prob < 0
