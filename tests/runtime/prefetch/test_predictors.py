"""Predictors and advice on tables small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.model import ModelSpec, SharedSpec
from moec.manifests.runtime_limits import MAX_PASS_TOKENS
from moec.runtime import load
from moec.runtime.bundle.tables import PathTables, Tables
from moec.runtime.prefetch.advisor import Advisor, advised_experts, candidates, routed_ahead
from moec.runtime.prefetch.pass_state import PassState
from moec.runtime.prefetch.predictors import (
    MINIMUM_PAIR_COUNT,
    LookaheadPredictor,
    PathPredictor,
    PopularityPredictor,
    Predictor,
    make_predictor,
)
from moec.runtime.prefetch.quality import PrefetchQuality
from tests.manifests.examples import WITH_ENCODER, layer_spec, model_spec

NOTHING = np.zeros((1, 1), np.float32)
MODEL = model_spec((layer_spec(experts=4),) * 3)
PLAIN = replace(layer_spec(), experts=replace(layer_spec().experts, count=0, top_k=0), shared=SharedSpec(64))


Key = tuple[int, ...]


def tables(known: dict[Key, dict[int, int]], transitions: dict[tuple[int, int], list[int]] | None = None) -> Tables:
    """Three layers of four experts, two per token.

    known: (layer, a, b), or a layer and two sets -> successor -> count.
    transitions: (layer, a) -> counts.
    """
    keys = sorted(known)
    has_sets = bool(keys) and len(keys[0]) > 3
    rows = keys if has_sets else [(layer * 4 + first) * 4 + last for layer, first, last in keys]
    moved = np.zeros((2, 4, 4), np.uint32)
    for place, counts in (transitions or {}).items():
        moved[place] = counts
    return Tables(
        popularity=np.array([[9, 1, 1, 1], [1, 9, 1, 1], [1, 2, 3, 4]], np.uint32),
        paths=PathTables(
            transitions=moved,
            keys=np.array(rows, np.uint16 if has_sets else np.int64),
            offsets=np.cumsum([0, *(len(known[key]) for key in keys)]).astype(np.int64),
            experts=np.array([expert for key in keys for expert in known[key]], np.uint16),
            counts=np.array([count for key in keys for count in known[key].values()], np.uint32),
        ),
    )


def state(*chosen: list[list[int]]) -> PassState:
    """chosen: per layer run so far, the experts of each token."""
    return PassState(len(chosen) - 1, NOTHING, [np.array(one, np.int32) for one in chosen])


def scores(predictor: PathPredictor, *chosen: list[list[int]]) -> list[float]:
    found = predictor.scores(state(*chosen))
    assert found is not None
    return found.tolist()  # type: ignore[no-any-return]


def test_pairs_vote_with_their_shares() -> None:
    predictor = PathPredictor(tables({(2, 0, 1): {2: 6, 3: 2}, (2, 0, 2): {3: 10}, (2, 1, 1): {0: 9}}, {}), MODEL)
    assert scores(predictor, [[0, 3]], [[1, 2]]) == pytest.approx([0, 0, 0.75, 0.25 + 1])
    # Two tokens: each votes for itself.
    assert scores(predictor, [[0, 3], [1, 3]], [[1, 2], [1, 3]]) == pytest.approx([1, 0, 0.75, 1.25])


def test_rare_pairs_fall_back_to_the_last_expert_alone() -> None:
    rare = {1: MINIMUM_PAIR_COUNT - 2, 2: 1}
    predictor = PathPredictor(tables({(2, 0, 1): rare}, {(1, 1): [1, 0, 0, 3], (1, 2): [0, 2, 0, 0]}), MODEL)
    assert scores(predictor, [[0, 3]], [[1, 2]]) == pytest.approx([0.25, 1, 0, 0.75])
    enough = {1: MINIMUM_PAIR_COUNT - 1, 2: 1}
    predictor = PathPredictor(tables({(2, 0, 1): enough}, {(1, 1): [1, 0, 0, 3], (1, 2): [0, 2, 0, 0]}), MODEL)
    assert scores(predictor, [[0, 3]], [[1, 2]]) == pytest.approx([0, 0.875, 0.125, 0])


def test_unknown_experts_fall_back_to_popularity() -> None:
    assert scores(PathPredictor(tables({}), MODEL), [[0, 3]], [[1, 2]]) == [1, 2, 3, 4]


def test_the_first_layer_has_no_pair_yet() -> None:
    predictor = PathPredictor(tables({(1, 0, 0): {3: 99}}, {(0, 2): [0, 0, 5, 5]}), MODEL)
    assert scores(predictor, [[2, 1]]) == pytest.approx([0, 0, 0.5, 0.5])


def test_after_the_last_layer_comes_the_first() -> None:
    for predictor in (PathPredictor(tables({}), MODEL), PopularityPredictor(tables({}), MODEL)):
        found = predictor.scores(state([[0, 1]], [[0, 1]], [[0, 1]]))
        assert found is not None and found.tolist() == [9, 1, 1, 1]


def test_candidates() -> None:
    ranked = np.array([0.5, 2.0, 0.5, 3.0, 0.0])
    assert [candidates(ranked, count) for count in (0, 1, 3, 9)] == [[], [3], [3, 1, 0], [3, 1, 0, 2, 4]]


def test_fewer_experts_are_advised_the_further_the_layer() -> None:
    assert [advised_experts(top_k, 1) for top_k in (1, 2, 3, 4, 8)] == [1, 1, 2, 2, 3]
    assert [advised_experts(8, ahead) for ahead in (1, 2, 3, 4)] == [3, 2, 1, 1]
    assert [advised_experts(top_k, 2) for top_k in (1, 2, 3)] == [0, 0, 0]
    assert advised_experts(8, 1, nearest=4) == 4


class _Counting(Predictor):
    def __init__(self) -> None:
        self.asked: list[int] = []

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray:
        self.asked.append(ahead)
        return np.ones(64)


def test_no_router_is_asked_where_no_expert_would_be_advised(tiny_bundle: Path) -> None:
    with load(tiny_bundle, expert_cache="50%", context=8, prefetch_layers=4, prefetch_rule="spread") as engine:
        top_k = engine.model.spec.layers[0].experts.top_k
        engine.model.advisor.predictor = counting = _Counting()
        engine.step([5], [0], [0])
        assert set(counting.asked) == {ahead for ahead in (1, 2, 3, 4) if advised_experts(top_k, ahead)}


def test_lookahead_is_the_next_router_applied_here(tiny_bundle: Path) -> None:
    with load(tiny_bundle, expert_cache="50%", context=16, prefetch="lookahead") as engine:
        model, predictor = engine.model, engine.model.advisor.predictor
        assert isinstance(predictor, LookaheadPredictor)
        hidden = np.random.default_rng(1).standard_normal((3, model.spec.hidden_size)).astype(np.float32)
        found = predictor.scores(PassState(0, hidden, []))
        norm, router = model.router_norms()[1].weight.astype(np.float64), model.routers()[1]
        assert router is not None
        rows = router.logits(np.eye(model.spec.hidden_size, dtype=np.float32)).T
        wide = hidden.astype(np.float64)
        normed = norm * wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + model.spec.norm_eps)
        logits = normed @ rows.T.astype(np.float64)
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        expected = (shares / shares.sum(axis=1, keepdims=True)).sum(axis=0)
        assert found == pytest.approx(expected, rel=1e-4)
        further = predictor.scores(PassState(0, hidden, []), 2)
        assert further is not None and further.tolist() == predictor.scores(PassState(1, hidden, [])).tolist()  # type: ignore[union-attr]
        last = predictor.scores(PassState(2, hidden, []))
        assert last is not None and last.tolist() == engine.bundle.tables().popularity[0].tolist()


def test_make_predictor(tiny_bundle: Path) -> None:
    known = tables({})
    with load(tiny_bundle, expert_cache="100%", context=16, prefetch="off") as engine:
        spec = engine.model.spec
        assert engine.model.advisor.predictor is None and make_predictor("off", known, spec, [], []) is None
        assert isinstance(make_predictor("path", known, spec, [], []), PathPredictor)
        assert isinstance(make_predictor("popularity", known, spec, [], []), PopularityPredictor)


def test_recall_counts_demanded_experts() -> None:
    quality = PrefetchQuality()
    assert quality.recall is None
    quality.observe(1, {0, 2}, np.array([2, 3]))
    quality.observe(2, {1}, np.array([1, 0]))
    assert quality.recall == 0.5 and dict(quality.demanded) == {1: 2, 2: 2}


def advising(spec: ModelSpec, known: Tables) -> Advisor:
    first_expert = np.cumsum([0, *(layer.experts.count for layer in spec.layers)]).tolist()
    return Advisor(spec, first_expert, PopularityPredictor(known, spec), rule="spread")


def test_scores_of_the_largest_layer_are_cut_to_the_next_one() -> None:
    """Tables are as wide as the largest layer; what they say of experts that a smaller one lacks is not asked for."""
    wide = np.array([[1, 2, 3, 4], [9, 8, 7, 6]], np.uint32)
    spec = model_spec((layer_spec(experts=4, top_k=1), layer_spec(experts=2, top_k=1)))
    advisor = advising(spec, replace(tables({}), popularity=wide))
    following, _ = advisor.advise(PassState(0, np.zeros((8, 1), np.float32), []))
    assert following == [0, 1]


def test_a_pass_that_asks_for_all_of_every_layer_looks_as_far_as_a_token() -> None:
    """Eight choices per expert: eight tokens of four of four experts."""
    advisor = advising(model_spec((layer_spec(experts=4, top_k=4),) * 3), tables({}))
    seven, eight = np.zeros((7, 1), np.float32), np.zeros((8, 1), np.float32)
    assert advisor.advise(PassState(0, seven, []))[1] == [5, 4, 6, 7]
    assert advisor.advise(PassState(0, eight, []))[1] == [5, 4, 6, 7, 11, 10, 9, 8]
    advisor.layers = 1
    assert advisor.advise(PassState(0, eight, []))[1] == [5, 4, 6, 7]


def test_the_layer_after_next_is_advised_last_and_only_for_a_single_token() -> None:
    advisor = advising(model_spec((layer_spec(experts=4, top_k=4),) * 3), tables({}))
    one, many = np.zeros((1, 1), np.float32), np.zeros((2, 1), np.float32)
    following, advice = advisor.advise(PassState(0, one, []))
    assert following == [1, 0] and advice == [5, 4, 11]
    assert advisor.advise(PassState(0, many, []))[1] == [5, 4, 6, 7]
    assert advisor.advise(PassState(1, one, []))[1] == [11, 10]
    advisor.layers, advisor.experts = 1, 3
    assert advisor.advise(PassState(0, one, []))[1] == [5, 4, 6]


@pytest.mark.parametrize("tokens, sequences, next_ones", [(1, 1, 1), (9, 1, 1), (9, 3, 9), (MAX_PASS_TOKENS, 1, 16)])
def test_behind_a_prompt_comes_a_token_or_more_of_it_and_behind_several_sequences_as_many(
    tokens: int, sequences: int, next_ones: int
) -> None:
    """Two experts for each of top-4; of a prompt, all that there are."""
    known = replace(tables({}), popularity=np.tile(np.arange(32, 0, -1, np.uint32), (3, 1)))
    advisor = advising(model_spec((layer_spec(experts=32, top_k=4),) * 3), known)
    last = PassState(2, np.zeros((tokens, 1), np.float32), [], sequences=sequences)
    assert advisor.advise(last)[1] == list(range(2 * next_ones))
    if tokens > 1:
        advisor.rule = "likely"  # which learns of tokens alone
        assert advisor.advise(last)[1] == (list(range(2 * next_ones)) if next_ones > 1 else [])


def test_layers_that_route_nothing_are_looked_past() -> None:
    routed = layer_spec(experts=4, top_k=4)
    spec = model_spec((routed, PLAIN, routed))
    advisor, one = advising(spec, tables({})), np.zeros((1, 1), np.float32)
    assert advisor.advise(PassState(0, one, []))[1] == [7, 6]  # layer 2, the next that routes
    assert advisor.advise(PassState(1, one, []))[1] == [7, 6]
    assert advisor.advise(PassState(2, one, []))[1] == [0, 1]  # the next token's first
    assert [routed_ahead(spec, layer) for layer in range(3)] == [[2], [1], [1]]
    # And the dictionary goes from routed layer to routed layer.
    predictor = PathPredictor(tables({}, {(0, 1): [0, 0, 0, 8]}), spec)
    routes, nothing = np.array([[1]], np.int32), np.zeros((1, 0), np.int32)
    for running, ahead in ((PassState(0, NOTHING, [routes]), 2), (PassState(1, NOTHING, [routes, nothing]), 1)):
        found = predictor.scores(running, ahead)
        assert found is not None and found.tolist() == [0, 0, 0, 1]


def test_behind_the_last_layer_comes_the_decoders_first() -> None:
    spec = WITH_ENCODER  # of five layers, those that route are 1 in the encoder, 3 and 4 in the decoder
    assert [routed_ahead(spec, layer) for layer in range(5)] == [[1, 3, 4], [2, 3], [1, 2], [1], [2]]
    known = replace(tables({}), popularity=np.diag([1, 2, 3, 4, 5]).astype(np.uint32))
    found = PopularityPredictor(known, spec).scores(PassState(4, NOTHING, []), 2)
    assert found is not None and found.tolist() == [0, 0, 0, 4, 0]


def test_nothing_is_predicted_where_all_experts_fit(tiny_bundle: Path) -> None:
    with load(tiny_bundle, expert_cache="100%", context=16) as engine:
        assert engine.model.advisor.predictor is None and "prefetch off (all fit)" in engine.mode


@given(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)), max_size=30), st.data())
def test_rows_of_path_keys(keys: set[tuple[int, int, int]], data: st.DataObject) -> None:
    """Rows are those of a dictionary, in the order of the requested experts."""
    paths = tables({key: {0: 9} for key in keys}, {}).paths
    assert paths is not None
    experts = st.lists(st.integers(0, 3), max_size=4)
    layer, before, chosen = data.draw(st.integers(0, 2)), data.draw(experts), data.draw(experts)
    known = {key: row for row, key in enumerate(sorted(keys))}
    asked = [(layer, one, last) for last in chosen for one in before]
    assert paths.rows(layer, before, chosen) == [known[key] for key in asked if key in known]


def test_both_sets_predict_in_any_order() -> None:
    known = tables({(2, 0, 3, 1, 2): {2: 6, 3: 2}, (2, 0, 3, 1, 3): {0: 9}})
    assert (
        scores(PathPredictor(known, MODEL), [[0, 3]], [[1, 2]])
        == scores(PathPredictor(known, MODEL), [[3, 0]], [[2, 1]])
        == [0, 0, 0.75, 0.25]
    )
    assert scores(PathPredictor(known, MODEL), [[0, 3], [3, 0]], [[1, 2], [3, 1]]) == [1, 0, 0.75, 0.25]


def test_unknown_and_rare_sets_fall_back() -> None:
    rare = {1: MINIMUM_PAIR_COUNT - 1}
    last = {(1, 1): [1, 0, 0, 3], (1, 2): [0, 2, 0, 0]}
    for known in (tables({(2, 0, 3, 1, 2): rare}, last), tables({(2, 0, 3, 1, 3): {1: 99}}, last), tables({}, last)):
        assert scores(PathPredictor(known, MODEL), [[0, 3]], [[1, 2]]) == [0.25, 1, 0, 0.75]
    assert scores(PathPredictor(tables({}), MODEL), [[0, 3]], [[1, 2]]) == [1, 2, 3, 4]


def test_fewer_experts_than_in_the_calibration_match_no_set() -> None:
    known = tables({(2, 0, 3, 1, 2): {2: 9}}, {(1, 1): [0, 0, 0, 5]})
    assert scores(PathPredictor(known, MODEL), [[0]], [[1]]) == [0, 0, 0, 1]
    assert known.paths is not None
    assert known.paths.rows(2, [0, 3, 1], [2]) == known.paths.rows(2, [], [1, 2]) == []
    assert scores(PathPredictor(tables({(1, 0, 3, 1, 2): {2: 9}}), MODEL), [[0, 3]]) == [
        1,
        9,
        1,
        1,
    ]  # one layer has run


PAIR = st.sampled_from(list(combinations(range(4), 2)))


@given(st.sets(st.tuples(st.integers(0, 2), PAIR, PAIR), max_size=40), st.integers(0, 2), PAIR, PAIR)
def test_rows_of_sets(
    known: set[tuple[int, Key, Key]], layer: int, before: tuple[int, int], chosen: tuple[int, int]
) -> None:
    """The row is that of a dictionary."""
    rows = sorted((at, *first, *second) for at, first, second in known)
    paths = tables({key: {0: 9} for key in rows}).paths
    assert paths is not None
    key = (layer, *before, *chosen)
    assert paths.rows(layer, before[::-1], chosen) == ([rows.index(key)] if key in rows else [])
