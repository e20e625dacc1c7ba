"""Predictions from exact sets of experts, on tables small enough to work out by hand."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moec.runtime.bundle.tables import PathTables, Tables
from moec.runtime.prefetch.pass_state import PassState
from moec.runtime.prefetch.predictors import MINIMUM_PAIR_COUNT, PathPredictor
from tests.manifests.examples import layer_spec, model_spec

MODEL = model_spec((layer_spec(experts=4),) * 3)
Key = tuple[int, ...]


def tables(sets: dict[Key, dict[int, int]], last: dict[int, list[int]] | None = None) -> Tables:
    """Three layers of four experts, two per token. sets: key -> successor -> count.

    last: expert of layer 1 -> counts.
    """
    moved = np.zeros((2, 4, 4), np.uint32)
    for expert, counts in (last or {}).items():
        moved[1, expert] = counts
    rows = sorted(sets)
    return Tables(
        popularity=np.array([[9, 1, 1, 1], [1, 9, 1, 1], [1, 2, 3, 4]], np.uint32),
        paths=PathTables(
            transitions=moved,
            keys=np.array(rows, np.uint16).reshape(-1, 5),
            offsets=np.cumsum([0, *(len(sets[key]) for key in rows)]).astype(np.int64),
            experts=np.array([expert for key in rows for expert in sets[key]], np.uint16),
            counts=np.array([count for key in rows for count in sets[key].values()], np.uint32),
        ),
    )


def scores(known: Tables, *chosen: list[list[int]]) -> list[float]:
    state = PassState(len(chosen) - 1, np.zeros((1, 1), np.float32), [np.array(one, np.int32) for one in chosen])
    found = PathPredictor(known, MODEL).scores(state)
    assert found is not None
    return found.tolist()  # type: ignore[no-any-return]


def test_both_sets_predict_in_any_order() -> None:
    known = tables({(2, 0, 3, 1, 2): {2: 6, 3: 2}, (2, 0, 3, 1, 3): {0: 9}})
    assert scores(known, [[0, 3]], [[1, 2]]) == scores(known, [[3, 0]], [[2, 1]]) == [0, 0, 0.75, 0.25]
    assert scores(known, [[0, 3], [3, 0]], [[1, 2], [3, 1]]) == [1, 0, 0.75, 0.25]


def test_unknown_and_rare_sets_fall_back() -> None:
    rare = {1: MINIMUM_PAIR_COUNT - 1}
    last = {1: [1, 0, 0, 3], 2: [0, 2, 0, 0]}
    for known in (tables({(2, 0, 3, 1, 2): rare}, last), tables({(2, 0, 3, 1, 3): {1: 99}}, last), tables({}, last)):
        assert scores(known, [[0, 3]], [[1, 2]]) == [0.25, 1, 0, 0.75]
    assert scores(tables({}), [[0, 3]], [[1, 2]]) == [1, 2, 3, 4]


def test_fewer_experts_than_in_the_calibration_match_no_set() -> None:
    known = tables({(2, 0, 3, 1, 2): {2: 9}}, {1: [0, 0, 0, 5]})
    assert scores(known, [[0]], [[1]]) == [0, 0, 0, 1]
    assert known.paths is not None
    assert known.paths.rows(2, [0, 3, 1], [2]) == known.paths.rows(2, [], [1, 2]) == []
    assert scores(tables({(1, 0, 3, 1, 2): {2: 9}}), [[0, 3]]) == [1, 9, 1, 1]  # one layer has run


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
