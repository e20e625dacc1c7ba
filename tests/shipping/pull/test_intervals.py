"""Ranges of finished bytes, compared with a set of bytes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from moec.shipping.pull.journal import Intervals

SIZE = 40
places = st.integers(0, SIZE)


@given(st.lists(st.tuples(places, places), max_size=12), places, places)
def test_as_a_set_of_bytes(added: list[tuple[int, int]], start: int, end: int) -> None:
    found, expected = Intervals(), set[int]()
    for first, last in added:
        found.add(first, last)
        expected |= set(range(first, last))
    assert found.size_bytes == len(expected)
    missing = [at for first, last in found.missing(SIZE) for at in range(first, last)]
    assert missing == sorted(set(range(SIZE)) - expected)
    assert found.has(start, end) == (set(range(start, end)) <= expected)
    assert found.end_from(start) == next(at for at in range(start, SIZE + 1) if at not in expected)
    if start <= end:
        assert found.overlap_bytes(start, end) == len(expected & set(range(start, end)))
    gaps = found.missing(SIZE)
    assert all(last < first for (_, last), (first, _) in itertools.pairwise(gaps))
    found.clear()
    assert found.size_bytes == 0 and found.missing(SIZE) == [(0, SIZE)]
