"""Decisions of one layer, by hand: misses that are replaced, dropped or read, and best experts that stay."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import numpy as np

from moec.manifests.model import ExpertsSpec
from moec.manifests.router import RouterSpec
from moec.runtime.layers.routing import NO_EXPERT, Routed, RoutingRule
from moec.runtime.modes.choice import DecisionState, ModeCounts, PassChoice, Versions
from moec.runtime.options.lossy import parse_modes

EXPERTS = 4
LOW = EXPERTS  # the low version of expert e is stored at LOW + e, and chosen as that


class Holding:
    """A logical cache that holds these stored indices."""

    def __init__(self, held: Collection[int]) -> None:
        self._held = held

    def is_resident(self, index: int) -> bool:
        return index in self._held


def decided(
    logits: list[float], held: Collection[int], router: RouterSpec | None = None, **modes: str
) -> tuple[list[int], list[float], ModeCounts]:
    """Chosen experts, their weights and the counts of one token of a top-2 layer."""
    rule = RoutingRule(ExpertsSpec(EXPERTS, 2, 32, "silu", router or RouterSpec("softmax", True)))
    rows = np.array([logits], np.float32)
    chosen, weights = rule.route(rows)
    names = ("dynamic_precision", "big_little", "cache_routing")
    counts, low = ModeCounts(), np.arange(LOW, 2 * LOW)
    parsed = parse_modes(*(modes.get(name) for name in names))
    choice = PassChoice(DecisionState(parsed, Versions([0, EXPERTS], low), cast(Any, Holding(held)), counts))
    found, shares = choice.select(Routed(0, rule, rows, chosen, weights))
    return found[0].tolist(), shares[0].tolist(), counts


def test_a_cached_expert_within_the_margin_stands_in() -> None:
    logits = [3.0, 2.0, 1.9, -5.0]
    assert decided(logits, {0, 2}, cache_routing="margin=0.2")[0] == [0, 2]
    assert decided(logits, {0, 3}, cache_routing="margin=0.2")[0] == [0, 1], "nothing near is there"
    assert decided(logits, {0, 1, 2}, cache_routing="margin=0.2")[0] == [0, 1], "nothing is missed"
    assert decided(logits, {2}, cache_routing="margin=0.9")[0] == [0, 2], "the best expert is read"


def test_a_low_version_counts_as_cached_where_low_will_do() -> None:
    """The second expert's unimportance is the first one's share, .73."""
    logits = [3.0, 2.0, 1.9, -5.0]
    both = {"cache_routing": "margin=0.2"}
    held_low = {0, LOW + 1}
    assert decided(logits, held_low, **both, dynamic_precision="0.5,1")[0] == [0, LOW + 1]
    assert decided(logits, {*held_low, 2}, **both, dynamic_precision="0.9,1")[0] == [0, 2], "its high version is needed"
    assert decided(logits, {0, LOW + 2}, **both, dynamic_precision="0.9,1")[0] == [0, 1], "no stand-in that is read"
    assert decided(logits, {0, LOW + 2}, **both, dynamic_precision="0.5,1")[0] == [0, LOW + 2]


def test_the_best_expert_of_a_token_is_the_one_with_the_largest_weight() -> None:
    """A router that corrects its scores ranks the lighter expert first; it is the one that may go."""
    router = RouterSpec("sigmoid", True, correction=(1.0, 0.0, 0.0, 0.0))
    logits = [-2.0, 2.0, -9.0, -9.0]
    chosen, weights, _ = decided(logits, set(), router, cache_routing="drop=0.01")
    assert chosen == [0, 1] and weights[0] < 0.2 < weights[1]
    chosen, weights, counts = decided(logits, set(), router, cache_routing="drop=0.5")
    assert chosen == [NO_EXPERT, 1] and counts.dropped == 1
    assert weights[1] == 1.0, "the rest has the weight"
    chosen, _, _ = decided(logits, set(), router, dynamic_precision="0,1")
    assert chosen == [LOW, 1]


def test_unimportant_misses_are_low_or_skipped() -> None:
    logits = [3.0, 2.0, 1.9, -5.0]
    assert decided(logits, set(), dynamic_precision="0.8,1")[0] == [0, 1]
    assert decided(logits, set(), dynamic_precision="0.5,1")[0] == [0, LOW + 1]
    chosen, weights, counts = decided(logits, set(), dynamic_precision="0.5,0.6")
    assert chosen == [0, NO_EXPERT] and weights[0] == 1.0 and counts.skipped == 1
