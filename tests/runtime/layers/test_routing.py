"""Routing against the plainest words of each rule."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.model import ExpertsSpec, RouterSpec, StaticRouting
from moec.runtime.layers.routing import RoutingRule

EXPERTS = 8


def spec(top_k: int, **router: Any) -> ExpertsSpec:
    return ExpertsSpec(EXPERTS, top_k, 32, "silu", RouterSpec(**{"scoring": "softmax", "renormalize": False, **router}))


def plain_route(logits: list[float], experts: ExpertsSpec) -> tuple[list[int], list[float]]:
    """One token, by hand."""
    router = experts.router
    if router.scoring == "sparsemixer":
        return plain_sparsemixer(logits, router.margin)
    if router.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        total = sum(math.exp(x - max(logits)) for x in logits)
        scores = [math.exp(x - max(logits)) / total for x in logits]
    ranked = [score + (router.correction[at] if router.correction else 0) for at, score in enumerate(scores)]
    size = len(logits) // router.groups
    best = 2 if router.group_score == "top2" else 1

    def worth(group: int) -> float:
        return sum(sorted(ranked[group * size : (group + 1) * size])[-best:])

    kept = sorted(range(router.groups), key=lambda group: -worth(group))[: router.kept_groups]
    allowed = [at for at in range(len(logits)) if at // size in kept]
    chosen = sorted(allowed, key=lambda at: -ranked[at])[: experts.top_k]
    weights = [scores[at] for at in chosen]
    total = sum(weights) if router.renormalize else 1.0
    return chosen, [router.scale * weight / total for weight in weights]


def plain_sparsemixer(logits: list[float], margin: float) -> tuple[list[int], list[float]]:
    """One token, by hand."""
    chosen: list[int] = []
    weights: list[float] = []
    for _ in range(2):
        left = [at for at in range(len(logits)) if at not in chosen]
        best = max(left, key=lambda at: logits[at])
        largest = logits[best]
        near = [at for at in left if largest - logits[at] <= margin * max(abs(logits[at]), largest)]
        weights.append(1 / sum(math.exp(logits[at] - largest) for at in near))
        chosen.append(best)
    return chosen, weights


# Far enough apart that no rounding decides.
LOGITS = st.permutations(range(EXPERTS)).map(lambda order: [0.37 * at - 1.1 for at in order])
CORRECTION = st.permutations(range(EXPERTS)).map(lambda order: tuple(0.041 * at - 0.1 for at in order))


@pytest.mark.parametrize(
    "router",
    [
        {},
        {"renormalize": True, "scale": 2.5},
        {"scoring": "sigmoid"},
        {"scoring": "sigmoid", "renormalize": True},
        {"groups": 4, "kept_groups": 2},
        {"scoring": "sigmoid", "groups": 2, "kept_groups": 1, "group_score": "top2", "renormalize": True, "scale": 0.5},
        {"scoring": "sparsemixer"},
        {"scoring": "sparsemixer", "margin": 0.35},
        {"scoring": "sparsemixer", "margin": 1.5},
    ],
)
@given(tokens=st.lists(LOGITS, min_size=1, max_size=3), correction=CORRECTION, corrects=st.booleans())
def test_experts_and_weights(
    router: dict[str, Any], tokens: list[list[float]], correction: tuple[float, ...], corrects: bool
) -> None:
    is_sparse = router.get("scoring") == "sparsemixer"
    experts = spec(2 if is_sparse else 3, **router, correction=correction if corrects and not is_sparse else ())
    chosen, weights = RoutingRule(experts).route(np.array(tokens, np.float32))
    assert chosen.dtype == np.int32 and weights.dtype == np.float32
    for row, logits in enumerate(tokens):
        expected, shares = plain_route(logits, experts)
        assert chosen[row].tolist() == expected
        assert weights[row].tolist() == pytest.approx(shares, rel=1e-5)


def test_of_equal_scores_the_lowest_expert_wins() -> None:
    for router in ({}, {"scoring": "sigmoid"}, {"groups": 2, "kept_groups": 1}):
        assert RoutingRule(spec(3, **router)).route(np.zeros((1, EXPERTS), np.float32))[0].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    "experts",
    [
        spec(4, scoring="sigmoid", groups=2, kept_groups=2, group_score="top2", renormalize=True),
        spec(2, scoring="sparsemixer", margin=0.6),
    ],
    ids=["groups", "sparsemixer"],
)
def test_a_token_alone_is_routed_as_among_others(experts: ExpertsSpec) -> None:
    logits = np.random.default_rng(1).normal(size=(50, EXPERTS)).astype(np.float32)
    before = logits.copy()
    chosen, weights = RoutingRule(experts).route(logits)
    assert np.array_equal(logits, before)
    for row in range(len(logits)):
        alone = RoutingRule(experts).route(logits[row : row + 1])
        assert np.array_equal(alone[0][0], chosen[row]) and np.array_equal(alone[1][0], weights[row])


@pytest.mark.parametrize(
    "router",
    [
        {}, {"renormalize": True, "scale": 1.5}, {"scoring": "sigmoid", "renormalize": True},
        {"scoring": "uniform", "scale": 2.0},
    ],
)  # fmt: skip
def test_experts_of_static_routing_follow_from_the_token(router: dict[str, Any]) -> None:
    table = np.array([[0, 3], [7, 1], [2, 6]])
    experts = spec(2, **router, static=StaticRouting(tuple(table.reshape(-1).tolist())))
    logits = np.random.default_rng(3).normal(size=(5, EXPERTS)).astype(np.float32)
    tokens = np.array([2, 0, 0, 1, 2])
    chosen, weights = RoutingRule(experts).route(logits, tokens)
    assert chosen.dtype == np.int32 and np.array_equal(chosen, table[tokens])
    for row, own in enumerate(logits.astype(np.float64)):
        scores = 1 / (1 + np.exp(-own)) if router.get("scoring") == "sigmoid" else np.exp(own) / np.exp(own).sum()
        expected = scores[chosen[row]] if router.get("scoring") != "uniform" else np.array([0.5, 0.5])
        expected = expected / expected.sum() if router.get("renormalize") else expected
        assert weights[row] == pytest.approx(router.get("scale", 1.0) * expected, rel=1e-5)
    with pytest.raises(ValueError, match="static routing needs the tokens"):
        RoutingRule(experts).route(logits)


def test_sparsemixer_of_equal_logits() -> None:
    """All are near, zeros among them, and the lowest two are chosen: of 8, then of 7."""
    for value in (0.0, 2.5, -2.5):
        chosen, weights = RoutingRule(spec(2, scoring="sparsemixer")).route(np.full((2, EXPERTS), value, np.float32))
        assert chosen.tolist() == [[0, 1]] * 2
        assert weights == pytest.approx(np.array([[1 / 8, 1 / 7]] * 2))


def test_demand_adds_up_over_tokens_and_leaves_other_groups_out() -> None:
    logits = np.array([[5, 0, 0, 0, 0, 0, 0, 4], [5, 0, 0, 0, 0, 0, 0, 4]], np.float32)
    demand = RoutingRule(spec(1, groups=2, kept_groups=1)).demand(logits)
    assert demand[0] > 1 and not demand[4:].any()
    assert RoutingRule(spec(1)).demand(logits).sum() == pytest.approx(2)
