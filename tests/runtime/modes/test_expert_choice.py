"""Decisions of one layer, by hand: misses that are replaced, dropped or read, and best experts that stay."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.model import ExpertsSpec, RouterSpec
from moec.runtime.layers.routing import (
    NO_EXPERT,
    NOT_CHOSEN,
    Routed,
    RoutingRule,
    least_unimportance,
    unimportance_by_expert,
    unimportance_of_token,
)
from moec.runtime.modes.expert_choice import PassChoice, Versions
from moec.runtime.modes.mode_counts import ModeCounts
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
    choice = PassChoice(parsed, Versions([0, EXPERTS], low), cast(Any, Holding(held)), counts)
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


def prompted(logits: list[list[float]], held: Collection[int], thresholds: str) -> tuple[Routed, ModeCounts]:
    """The experts and weights of a prompt in a top-2 layer under dynamic precision, and the counts."""
    rule = RoutingRule(ExpertsSpec(EXPERTS, 2, 32, "silu", RouterSpec("softmax", True)))
    rows = np.array(logits, np.float32)
    chosen, weights = rule.route(rows)
    counts, low = ModeCounts(), np.arange(LOW, 2 * LOW)
    modes = parse_modes(thresholds, None, None)
    versions, cache = Versions([0, EXPERTS], low), cast(Any, Holding(held))
    found, shares = PassChoice(modes, versions, cache, counts, is_prompt=True).select(
        Routed(0, rule, rows, chosen, weights)
    )
    return Routed(0, rule, rows, found, shares), counts


# Second experts of unimportance 0.73, 0.95 and 0.62.
PROMPT = [[3.0, 2.0, -9.0, -9.0], [3.0, -9.0, 0.0, -9.0], [-9.0, 1.5, -9.0, 2.0]]


def test_a_prompt_reads_an_expert_as_its_most_important_token_asks() -> None:
    """Expert 1 is second for two tokens: the less its unimportance, the more it is worth."""
    found, counts = prompted(PROMPT, set(), "0.7,0.9")
    assert found.chosen.tolist() == [[0, 1], [0, NO_EXPERT], [3, 1]], "0.62 asks for the high version"
    assert counts.prompt_experts == 4 == counts.prompt_missed and counts.prompt_skipped == 1
    found, counts = prompted(PROMPT, set(), "0.6,0.9")
    assert found.chosen.tolist() == [[0, LOW + 1], [0, NO_EXPERT], [3, LOW + 1]], "low for both tokens: one read"
    assert found.weights[1].tolist() == [1.0, 0.0], "the rest has the weight"
    assert counts.prompt_low == 1 and counts.ranks == counts.low == counts.skipped == 0
    found, counts = prompted(PROMPT, {0, 1, 2, 3}, "0,0.1")
    assert found.chosen.tolist() == [[0, 1], [0, 2], [3, 1]] and counts.prompt_missed == 0


def test_a_prompt_of_best_experts_stays_high() -> None:
    """Every expert is the best one of some token."""
    rows = [[3.0, 2.0, 1.0, 0.0], [0.0, 3.0, 2.0, 1.0], [1.0, 0.0, 3.0, 2.0], [2.0, 1.0, 0.0, 3.0]]
    found, counts = prompted(rows, set(), "0,0")
    assert found.chosen.max() < LOW and found.chosen.min() >= 0 and counts.prompt_experts == 4


@given(data=st.data())
def test_least_unimportance_is_that_of_the_token_that_needs_it_most(data: st.DataObject) -> None:
    """As token by token and rank by rank."""
    tokens, count, top_k = (data.draw(st.integers(1, most)) for most in (5, 6, 3))
    top_k = min(top_k, count)
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    chosen = np.array([rng.permutation(count)[:top_k] for _ in range(tokens)], np.int32)
    weights = rng.integers(0, 3, (tokens, top_k)).astype(np.float32)
    chosen[rng.random(chosen.shape) < 0.2] = NO_EXPERT
    expected = np.full(count, NOT_CHOSEN, np.float32)
    for row, own in zip(chosen, weights, strict=True):
        before = 0.0
        for rank in sorted(range(top_k), key=lambda at, own=own: -own[at]):  # type: ignore[misc]
            if row[rank] != NO_EXPERT:
                expected[row[rank]] = min(expected[row[rank]], np.float32(before))
            before += float(own[rank] / (own.sum() or np.float32(1)))
    assert np.array_equal(least_unimportance(chosen, weights, count), expected)


@given(seed=st.integers(0, 1 << 30), top_k=st.integers(1, 8), levels=st.integers(1, 4))
def test_one_token_has_the_unimportance_of_a_pass_with_it_alone(seed: int, top_k: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(16)[:top_k].astype(np.int32)
    chosen[rng.random(top_k) < 0.2] = NO_EXPERT
    weights = (rng.integers(0, levels, top_k) * rng.random()).astype(np.float32)
    alone = least_unimportance(chosen[None], weights[None], 16)
    assert unimportance_of_token(chosen.tolist(), weights) == unimportance_by_expert(alone)


def advised(unimportance: list[float] | None, thresholds: str | None, held: Collection[int] = ()) -> list[int]:
    """Stored experts that are read ahead for several tokens: 3, 1, 2 and 0 were predicted, likeliest first."""
    modes = parse_modes(thresholds, None, None if thresholds else "drop=0.1")
    versions = Versions([0, EXPERTS], np.arange(LOW, 2 * LOW))
    choice = PassChoice(modes, versions, cast(Any, Holding(held)), ModeCounts(), is_prompt=True)
    foreseen = None if unimportance is None else np.array(unimportance, np.float32)
    return choice.advised_to_many(0, foreseen, [3, 1, 2, 0])


def test_several_tokens_read_ahead_the_versions_that_they_will_ask_for() -> None:
    """Expert 0 is high, 1 low, 2 skipped, and no token was foreseen to choose 3."""
    foreseen = [0.1, 0.6, 0.95, NOT_CHOSEN]
    assert advised(foreseen, "0.5,0.9") == [LOW + 1, 0]
    assert advised(foreseen, "0.5,1") == [LOW + 3, LOW + 1, LOW + 2, 0], "an expert that none chose counts as 1"
    assert advised(foreseen, "0.5,0.9", {LOW + 2}) == [LOW + 1, LOW + 2, 0], "a cached low version is used"
    assert advised(None, "0.5,0.9") == [], "without foresight the version is not known"
    assert advised(None, None) == [3, 1, 2, 0], "other modes take high versions"
