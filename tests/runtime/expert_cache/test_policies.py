"""Policies on cases worked out by hand, HOBBIT's score, its limits, and the fit of its weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.errors import OptionError
from moec.runtime import load
from moec.runtime.expert_cache import open_cache as choice_of_cache
from moec.runtime.expert_cache.eviction import eviction_order
from moec.runtime.expert_cache.policies import (
    MultidimensionalScore,
    edgemoe_score,
    lfu_score,
    lrfu_score,
    lru_score,
    policy_score,
)
from moec.runtime.expert_cache.records import HALF_LIFE_TOKENS, ExpertRecords, expert_records, warm_order
from moec.runtime.options.runtime import EvictionWeights, RuntimeOptions, parse_weights
from moec.runtime.simulation.fitting import UNITS, fit_weights


def records(layer: list[int], frequency: list[float], num_layers: int) -> ExpertRecords:
    zeros = np.zeros(len(layer), np.int64)
    heat = np.full(len(layer), -np.inf)
    return ExpertRecords(np.array(layer, np.int32), np.array(frequency), zeros, zeros.copy(), heat, num_layers)


@pytest.mark.parametrize(
    ("running", "distances"), [(0, [4, 1, 2, 3]), (1, [3, 4, 1, 2]), (2, [2, 3, 4, 1]), (3, [1, 2, 3, 4])]
)
def test_layer_distance(running: int, distances: list[int]) -> None:
    """The next layer is 1 away, the running one comes again after all others."""
    assert records([0, 1, 2, 3], [0] * 4, 4).layer_distance(running).tolist() == distances


def test_a_model_of_one_layer() -> None:
    assert records([0, 0], [0.5, 0.5], 1).layer_distance(0).tolist() == [1, 1]


def test_edgemoe_by_hand() -> None:
    """f / d with layer 1 running: d = 3, 1, 2 for layers 1, 2, 0."""
    known = records([0, 0, 1, 1, 2, 2], [0.6, 0.4, 0.9, 0.1, 0.3, 0.05], 3)
    expected = [0.6 / 2, 0.4 / 2, 0.9 / 3, 0.1 / 3, 0.3 / 1, 0.05 / 1]
    assert edgemoe_score(known, 1) == pytest.approx(expected)
    order = eviction_order(known, edgemoe_score, 1, np.arange(6)).tolist()
    assert order[:3] == [3, 5, 1] and set(order[3:]) == {0, 2, 4}
    # One layer on, the experts of layer 2 are the farthest away: d = 1, 2, 3 for layers 0, 1, 2.
    assert eviction_order(known, edgemoe_score, 2, np.arange(6)).tolist() == [5, 3, 4, 1, 2, 0]


def test_ties_fall_to_the_least_recently_used_then_to_the_lowest_index() -> None:
    known = records([0, 0, 0, 0], [0.25] * 4, 1)
    known.last_used[:] = [5, 3, 3, 9]
    assert eviction_order(known, edgemoe_score, 0, np.array([3, 2, 1, 0])).tolist() == [1, 2, 0, 3]


def test_lru_and_lfu() -> None:
    known = records([0, 1, 0, 1], [0.1, 0.2, 0.3, 0.4], 2)
    known.last_used[:] = [4, 0, 7, 2]
    known.uses[:] = [1, 9, 5, 5]
    assert eviction_order(known, lru_score, 0, np.arange(4)).tolist() == [1, 3, 0, 2]
    assert eviction_order(known, lfu_score, 0, np.arange(4)).tolist() == [0, 3, 2, 1]
    assert eviction_order(known, lru_score, 0, np.array([2, 0])).tolist() == [0, 2]
    assert eviction_order(known, lru_score, 0, np.array([], np.int64)).tolist() == []


def test_lrfu_by_hand() -> None:
    """One layer: the clock counts tokens, and a use counts half after HALF_LIFE_TOKENS of them."""
    known = records([0, 0, 0], [0.0] * 3, 1)
    for clock, used in ((1, [0]), (2, [0]), (HALF_LIFE_TOKENS + 2, [1]), (3 * HALF_LIFE_TOKENS + 2, [1])):
        known.use(used, clock)
    then = 2.0 ** (known.heat - known.last_used / known.half_life)
    assert then == pytest.approx([1 + 2 ** (-1 / HALF_LIFE_TOKENS), 1 + 1 / 4, 0])
    assert known.uses.tolist() == [2, 2, 0] and known.last_used.tolist() == [2, 3 * HALF_LIFE_TOKENS + 2, 0]
    # Today the two uses of expert 0 are worth 2 / 8, those of expert 1 5 / 4.
    now = 2.0 ** (lrfu_score(known, 0) - known.last_used.max() / known.half_life)
    assert now == pytest.approx([then[0] / 8, 5 / 4, 0], rel=1e-6)
    assert eviction_order(known, lrfu_score, 0, np.arange(3)).tolist() == [2, 0, 1]
    fresh = known.unused()
    assert fresh.uses.tolist() == [0, 0, 0] and known.uses.tolist() == [2, 2, 0]


def test_lrfu_starts_with_what_calibration_saw() -> None:
    known = expert_records(np.array([0, 0, 1, 1]), np.array([3.0, 1.0, 5.0, 5.0]), 2)
    assert (2.0**known.heat).tolist() == pytest.approx([HALF_LIFE_TOKENS * share for share in (0.75, 0.25, 0.5, 0.5)])


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 12), levels=st.integers(1, 5))
def test_the_first_of_an_order_are_those_of_the_whole_one(seed: int, count: int, levels: int) -> None:
    """This holds if many scores are equal, or none is known."""
    random = np.random.default_rng(seed)
    known = records(random.integers(0, 2, 20).tolist(), random.integers(0, levels, 20).tolist(), 2)
    known.last_used[:] = random.integers(0, 3, 20)
    candidates = random.permutation(20)[:12]
    for score in (edgemoe_score, lrfu_score, lru_score):
        whole = eviction_order(known, score, 1, candidates)
        assert eviction_order(known, score, 1, candidates, count).tolist() == whole[:count].tolist()


def test_frequencies_are_shares_of_a_layer() -> None:
    known = expert_records(np.array([0, 0, 1, 1, 2, 2]), np.array([3.0, 1.0, 0.0, 10.0, 0.0, 0.0]), 3)
    assert known.frequency.tolist() == [0.75, 0.25, 0, 1, 0, 0]
    assert warm_order(known).tolist() == [3, 0, 1, 2, 4, 5]
    assert known.last_used.tolist() == known.uses.tolist() == [0] * 6


LAYERS, EXPERTS = 3, 2
LAYER = np.repeat(np.arange(LAYERS), EXPERTS)
# Three passes of three layers; index = layer * 2 + expert.
PASSES = [(0, 2, 4), (0, 3, 4), (1, 3, 4)]


def used(passes: list[tuple[int, ...]]) -> object:
    records = expert_records(LAYER, np.zeros(LAYERS * EXPERTS), LAYERS)
    for number, chosen in enumerate(passes):
        for layer, index in enumerate(chosen):
            records.use([index], number * LAYERS + layer + 1)
    return records


def score(records: object, running: int, printed: bool = False, **weights: float) -> list[float]:
    all_weights = EvictionWeights(**{"lru": 0.0, "lfu": 0.0, "lhu": 0.0, "fld": 0.0, **weights})
    return MultidimensionalScore(all_weights, printed)(records, running).tolist()  # type: ignore[arg-type]


def test_each_term_by_hand() -> None:
    records = used(PASSES)
    assert score(records, 2, lru=1) == pytest.approx([2 / 3, 3 / 3, 1 / 3, 3 / 3, 3 / 3, 0])
    assert score(records, 2, lfu=1) == pytest.approx([2 / 3, 1 / 3, 1 / 3, 2 / 3, 3 / 3, 0])
    # Layer 2 runs: layer 0 is next (d = 1), then 1 (d = 2), then 2 itself (d = 3).
    assert score(records, 2, fld=1) == pytest.approx([1, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3])
    # As printed the running layer is the nearest: (l - I) mod 3 = 1, 2, 0.
    assert score(records, 2, printed=True, fld=1) == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3, 1, 1])
    mixed = score(records, 2, lru=0.25, lfu=0.25, fld=0.5)
    assert mixed[3] == pytest.approx(0.25 * 1 + 0.25 * 2 / 3 + 0.5 * 2 / 3)


def test_with_one_precision_uses_at_high_precision_are_uses() -> None:
    records = used(PASSES)
    assert score(records, 1, lfu=0.2, lhu=0.3, fld=0.5) == pytest.approx(score(records, 1, lfu=0.5, fld=0.5))


def test_a_sequence_begins_with_nothing_known() -> None:
    records = used(PASSES)
    records.begin_sequence()  # type: ignore[attr-defined]
    assert score(records, 0, lru=0.5, lfu=0.5) == [0] * 6
    for layer, index in enumerate((1, 2, 5)):
        records.use([index], 10 + layer)  # type: ignore[attr-defined]
    assert score(records, 2, lru=1) == [0, 1, 1, 0, 0, 1] == score(records, 2, lfu=1)
    assert records.sequence_passes == 1  # type: ignore[attr-defined]
    assert records.uses.tolist() == [2, 2, 2, 2, 3, 1], "the other policies count on"  # type: ignore[attr-defined]


@given(
    passes=st.lists(st.tuples(*[st.integers(0, EXPERTS - 1)] * LAYERS), max_size=12), running=st.integers(0, LAYERS - 1)
)
def test_at_its_corners_it_is_lru_and_lfu(passes: list[tuple[int, ...]], running: int) -> None:
    """Within one sequence; ties included, as every policy breaks them alike."""
    records = used([tuple(layer * EXPERTS + e for layer, e in enumerate(one)) for one in passes])
    everything = np.arange(LAYERS * EXPERTS)
    for weights, other in ((EvictionWeights(1, 0, 0, 0), lru_score), (EvictionWeights(0, 1, 0, 0), lfu_score)):
        mine = eviction_order(records, MultidimensionalScore(weights), running, everything)  # type: ignore[arg-type]
        assert mine.tolist() == eviction_order(records, other, running, everything).tolist()  # type: ignore[arg-type]


def test_weights_are_read_and_written() -> None:
    weights = parse_weights(" 0.125,.5, 0 ,0.375")
    assert weights == EvictionWeights(0.125, 0.5, 0, 0.375) and parse_weights(weights.to_text()) == weights
    assert parse_weights("0.333,0.333,0,0.334") and parse_weights("1,0,0,0").lru == 1
    for text in (
        "",
        "1",
        "0.5,0.5",
        "1,1,0,0",
        "0.5,0.6,0,0",
        "-1,1,1,0",
        "nan,0,0,1",
        "1,0,0,0,0",
        "a,b,c,d",
        "1.5,0,0,0",
    ):
        with pytest.raises(OptionError, match="is not four weights that add up to 1"):
            parse_weights(text)


def test_weights_without_a_policy_that_takes_them_are_refused() -> None:
    assert RuntimeOptions(policy="hobbit-printed", policy_weights="1,0,0,0").policy_weights == "1,0,0,0"
    with pytest.raises(OptionError, match="weights have no effect on the policy `lru`"):
        RuntimeOptions(policy="lru", policy_weights="1,0,0,0")
    with pytest.raises(OptionError, match="is not four weights"):
        RuntimeOptions(policy="hobbit", policy_weights="1,1,1,1")
    with pytest.raises(OptionError, match="must be a text or None"):
        RuntimeOptions(policy="hobbit", policy_weights=(1, 0, 0, 0))  # type: ignore[arg-type]
    assert policy_score("hobbit", "1,0,0,0") == MultidimensionalScore(EvictionWeights(1, 0, 0, 0))
    assert policy_score("hobbit-printed", "1,0,0,0") == MultidimensionalScore(EvictionWeights(1, 0, 0, 0), True)


@given(best=st.tuples(st.integers(0, UNITS), st.integers(0, UNITS)).filter(lambda p: sum(p) <= UNITS))
def test_the_search_finds_the_least_of_a_convex_penalty(best: tuple[int, int]) -> None:
    lru, lfu = (part / UNITS for part in best)
    calls: list[EvictionWeights] = []

    def penalty(weights: EvictionWeights) -> float:
        calls.append(weights)
        return (weights.lru - lru) ** 2 + (weights.lfu - lfu) ** 2

    found, least = fit_weights(penalty)
    assert (found.lru, found.lfu) == (lru, lfu) and least == 0
    assert len(calls) == len(set(calls)) <= 80
    assert all(abs(w.lru + w.lfu + w.lhu + w.fld - 1) < 1e-9 and min(w.lru, w.lfu, w.fld) >= 0 for w in calls)
    assert fit_weights(penalty)[0] == found


@given(best=st.tuples(*[st.integers(0, UNITS)] * 3).filter(lambda p: sum(p) <= UNITS))
def test_with_low_versions_uses_at_high_precision_have_a_weight_of_their_own(best: tuple[int, int, int]) -> None:
    lru, lfu, lhu = (part / UNITS for part in best)
    calls: list[EvictionWeights] = []

    def penalty(weights: EvictionWeights) -> float:
        calls.append(weights)
        return (weights.lru - lru) ** 2 + (weights.lfu - lfu) ** 2 + (weights.lhu - lhu) ** 2

    found, least = fit_weights(penalty, has_low_versions=True)
    assert (found.lru, found.lfu, found.lhu) == (lru, lfu, lhu) and least == 0
    assert len(calls) == len(set(calls)) <= 160


def test_a_flat_penalty_keeps_the_first_point() -> None:
    assert fit_weights(lambda weights: 1.0) == (EvictionWeights(0, 0, 0, 1), 1.0)


def test_every_generation_is_a_sequence_of_its_own(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the cache in Python. test_native_residency.py compares the other one with it."""
    monkeypatch.setattr(choice_of_cache, "why_not_native", lambda *options: "a test")
    with load(tiny_bundle, expert_cache="60%", context=32, policy="hobbit", policy_weights="0.5,0.5,0,0") as engine:
        for _ in range(2):
            list(engine.generate([5, 6, 7], max_new_tokens=4))
            records = engine.records
            assert records.sequence_passes == 4, "the prompt and three tokens after it"
            assert records.last_passes().max() == 4
            layers = engine.model.spec.num_layers
            top_k = engine.model.spec.layers[0].experts.top_k
            least = layers * top_k * 4
            assert least <= records.sequence_uses().sum() <= least + layers * top_k * 2
        assert records.uses.sum() > records.sequence_uses().sum()


def test_versions_share_their_uses() -> None:
    """F counts an expert in any version, H its high one; frequencies are those of the experts, counted once."""
    layer, popularity = np.array([0, 0, 0, 0]), np.array([3.0, 1.0, 3.0, 1.0])
    records = expert_records(layer, popularity, 1, expert=np.array([0, 1, 0, 1]))
    assert records.frequency.tolist() == [0.75, 0.25, 0.75, 0.25]
    for clock, used in enumerate(([0], [2], [2], [3]), 1):
        records.use(used, clock)
    assert records.sequence_uses().tolist() == [3, 1, 3, 1]
    assert records.high_precision_uses().tolist() == [1, 0, 1, 0]
    assert records.unused().expert is records.expert
    only_high = MultidimensionalScore(EvictionWeights(0, 0, 1, 0))
    assert only_high(records, 0).tolist() == [0.25, 0, 0.25, 0]
