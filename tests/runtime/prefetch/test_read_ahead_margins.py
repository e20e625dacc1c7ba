"""Learned thresholds: predictions are right as often as intended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moec.manifests.model import SharedSpec
from moec.runtime import load
from moec.runtime.model.one_call import PassExperts
from moec.runtime.prefetch.advisor import Advisor
from moec.runtime.prefetch.pass_state import PassState
from moec.runtime.prefetch.predictors import Predictor
from moec.runtime.prefetch.read_ahead_margins import PRECISION, LearnedThresholds
from tests.manifests.examples import layer_spec, model_spec

EXPERTS, TOP_K = 32, 4


def precision(noise: float, scale: float, tokens: int = 4000) -> tuple[float, float]:
    """A layer chooses by logits that the prediction saw through noise: how often advice was right, how much there was.

    Of the second half of the tokens. scale: of all logits.
    """
    random, thresholds = np.random.default_rng(3), LearnedThresholds()
    right, advised = 0, 0
    for token in range(tokens):
        seen = random.standard_normal(EXPERTS) * scale
        found = thresholds.likely(0, 1, 1, np.exp(seen), TOP_K)
        true = seen + random.standard_normal(EXPERTS) * noise * scale
        chosen = np.argsort(-true)[:TOP_K].tolist()
        thresholds.observe(1, chosen)
        if token >= tokens // 2:
            right, advised = right + len(set(found) & set(chosen)), advised + len(found)
    return right / max(advised, 1), advised / (tokens / 2)


@pytest.mark.parametrize("scale", [0.05, 1.0, 8.0])
def test_the_least_sure_expert_is_right_as_often_as_it_should_whatever_the_scale(scale: float) -> None:
    """The others are surer, so that all together are right more often; a better prediction advises more."""
    found = [precision(noise, scale) for noise in (0.6, 0.3, 0.05)]
    assert all(right > PRECISION for right, _ in found)
    few, some, many = (advised for _, advised in found)
    assert 0 < few < some < many <= TOP_K and some > 1


def test_the_first_prediction_advises_as_much_whatever_the_scale() -> None:
    """Ratios of the scores of sigmoids are a third of those of a softmax."""
    seen = np.random.default_rng(3).standard_normal(EXPERTS)
    found = [len(LearnedThresholds().likely(0, 1, 1, np.exp(scale * seen), TOP_K)) for scale in (0.05, 0.3, 1.0, 8.0)]
    assert found == [found[0]] * 4 and found[0] > 1


def test_a_prediction_that_knows_nothing_comes_to_advise_nothing() -> None:
    random, thresholds = np.random.default_rng(4), LearnedThresholds()
    popularity = np.exp(-np.arange(EXPERTS, dtype=np.float64))
    advised = []
    for _ in range(600):
        advised.append(len(thresholds.likely(2, 0, 1, popularity, TOP_K)))
        thresholds.observe(0, random.choice(EXPERTS, TOP_K, replace=False).tolist())
    assert advised[0] > 0 == sum(advised[300:])


def test_an_expert_of_no_score_is_never_likely() -> None:
    scores = np.array([0.0, 0.7, 0.0, 0.3, 0.0])
    assert LearnedThresholds().likely(2, 0, 1, scores, 4) == [1, 3]
    assert LearnedThresholds().likely(2, 0, 1, np.ones(3), 3) == [0, 1, 2], "a layer that chooses all"


class _Sure(Predictor):
    """Predicts experts 0, 1, 2, ... in this order, and after one of the layers in reverse order."""

    def __init__(self, wrong_after: int | None = None) -> None:
        self.wrong_after = wrong_after

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray:
        found = np.exp(-np.arange(8, dtype=np.float64))
        return found[::-1].copy() if state.layer == self.wrong_after else found


def test_advice_goes_by_the_threshold_for_one_token_and_by_count_for_many_or_where_a_count_is_given() -> None:
    advisor = Advisor(model_spec((layer_spec(experts=8, top_k=4),) * 3), [0, 8, 16, 24], _Sure())
    one, chosen = np.zeros((1, 1), np.float32), [np.array([[0, 1, 2, 3]], np.int32)]
    following, advice = advisor.advise(PassState(0, one, chosen))
    assert following == [0, 1, 2]  # margins of 4, 3 and 2, at least 0.3 times the first
    assert advice == [8, 9, 10, 16, 17], "at least 0.6 times the first, two layers ahead"
    many = np.zeros((2, 1), np.float32)
    assert advisor.advise(PassState(0, many, [np.repeat(chosen[0], 2, 0)]))[1] == [8, 9, 10, 11]
    advisor.experts = 1
    assert advisor.advise(PassState(0, one, chosen))[1] == [8, 16]


def test_a_pass_of_many_tokens_in_between_teaches_nothing() -> None:
    advisor = Advisor(model_spec((layer_spec(experts=8, top_k=4),) * 2), [0, 8, 16], _Sure())
    one, many = np.zeros((1, 1), np.float32), np.zeros((2, 1), np.float32)
    wrong = np.array([[7, 6, 5, 4]], np.int32)
    advisor.advise(PassState(0, one, [wrong]))
    before = advisor.thresholds.threshold(0, 1)
    advisor.advise(PassState(0, many, [np.repeat(wrong, 2, 0)]))
    advisor.advise(PassState(1, one, [wrong, wrong]))
    assert advisor.thresholds.threshold(0, 1) == before
    advisor.advise(PassState(0, one, [wrong]))
    advisor.advise(PassState(1, one, [wrong, wrong]))
    assert advisor.thresholds.threshold(0, 1) > before


def thresholds_of(thresholds: LearnedThresholds | PassExperts) -> list[float]:
    return [thresholds.threshold(*pair) for pair in ((0, 1), (0, 2), (1, 2), (2, 0))]


def test_what_looks_from_elsewhere_is_learned_apart() -> None:
    """After the last layer popularity predicts the first layer that routes, always wrong. Before it a router does."""
    plain = replace(layer_spec(), experts=replace(layer_spec().experts, count=0, top_k=0), shared=SharedSpec(64))
    spec = model_spec((plain, *(layer_spec(experts=8, top_k=4),) * 2))
    advisor = Advisor(spec, [0, 0, 8, 16], _Sure(wrong_after=2))
    one, chosen = np.zeros((1, 1), np.float32), np.array([[0, 1, 2, 3]], np.int32)
    routes = [np.zeros((1, 0), np.int32), chosen, chosen]
    for _ in range(200):
        advice = [advisor.advise(PassState(layer, one, routes[: layer + 1]))[1] for layer in range(3)]
    assert advice[0][:4] == [0, 1, 2, 3] and advice[2] == []


def test_what_was_learned_is_unlearned() -> None:
    """A threshold can be unlearned, for any number of earlier predictions that were right, or wrong."""
    thresholds = LearnedThresholds()
    scores = np.exp(-np.arange(8, dtype=np.float64))
    for chosen, expected in (([0, 1], 2), ([6, 7], 0), ([0, 1], 2)):
        for _ in range(5000):
            thresholds.likely(0, 1, 1, scores, 2)
            thresholds.observe(1, chosen)
        assert len(thresholds.likely(0, 1, 1, scores, 2)) == expected
        thresholds.forget_guesses()


def test_few_experts_with_a_score_are_no_proof() -> None:
    """Tables of paths score few experts. All others have no score, and the scored ones may be wrong each time."""
    thresholds, scores = LearnedThresholds(), np.array([0.0, 1.0, 0.0, 0.0])
    assert thresholds.likely(0, 1, 1, scores, 1) == [1]
    for _ in range(200):
        thresholds.observe(1, [3])
        found = thresholds.likely(0, 1, 1, scores, 1)
    assert len(found) == 0


def test_an_engine_learns_while_it_decodes_and_says_the_same(tiny_bundle: Path) -> None:
    """Two engines learn alike, and what is learned changes no result."""
    learned, rows = [], []
    for rule in ("likely", "likely", "spread"):
        with load(tiny_bundle, expert_cache="50%", context=64, prefetch_rule=rule) as engine:
            rows.append(np.concatenate([engine.decode([4 + 7 * at % 200], [0], [at]) for at in range(24)]).tobytes())
            model = engine.model
            learned.append(thresholds_of(model.pass_experts or model.advisor.thresholds))
    assert rows[0] == rows[1] == rows[2] and learned[0] == learned[1]
    fresh = LearnedThresholds()
    assert learned[2] == thresholds_of(fresh) != learned[0]
