"""Neighbours that wait are read together; nothing is lost, added or read twice."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.quant import PRUNED, QuantSpec
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.storage.read_runs import MAX_RUN_BYTES, NONE, ReadRuns, next_in_file, previous_in_file

QUARTER = MAX_RUN_BYTES // 4


def taken(queue: list[int], sizes: list[int], following: list[int], readers: int = 1) -> list[list[int]]:
    runs, waiting, found = ReadRuns(sizes, following, readers), deque(queue), []
    while waiting:
        found.append(runs.take(waiting))
    return found


def test_neighbours_on_both_sides_of_the_most_urgent_come_with_it() -> None:
    following = [1, 2, 3, 4, NONE, 6, NONE]
    assert taken([3, 6, 1, 2, 0], [1] * 7, following) == [[0, 1, 2, 3], [6]]
    assert taken([3, 5, 1, 0], [1] * 7, following) == [[3], [5], [0, 1]]
    assert taken([3, 2, 1], [1] * 7, [NONE] * 7) == [[3], [2], [1]]


def test_readers_share_what_waits() -> None:
    following = [1, 2, 3, 4, 5, NONE]
    assert taken([0, 1], [1] * 6, following, readers=2) == [[0], [1]]
    assert taken([0, 1, 2, 3, 4, 5], [1] * 6, following, readers=2) == [[0, 1, 2], [3, 4], [5]]


def test_a_run_is_bounded_and_a_large_expert_comes_alone() -> None:
    following = [1, 2, 3, 4, 5, NONE]
    assert taken([1, 2, 3, 4, 5, 0], [QUARTER] * 6, following) == [[1, 2, 3, 4], [5], [0]]
    assert taken([0, 1, 2], [QUARTER, 4 * QUARTER, QUARTER, 1, 1, 1], following) == [[0], [1], [2]]


@given(data=st.data())
def test_every_read_happens_once_and_runs_are_contiguous(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    sizes = data.draw(st.lists(st.sampled_from([1, QUARTER, 3 * QUARTER, 8 * QUARTER]), min_size=count, max_size=count))
    breaks = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    following = [at + 1 if at + 1 < count and not breaks[at] else NONE for at in range(count)]
    queue = data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=count))
    runs = taken(queue, sizes, following, data.draw(st.integers(1, 4)))
    assert sorted(index for run in runs for index in run) == sorted(queue)
    assert all(following[first] == second for run in runs for first, second in pairwise(run))
    assert all(len(run) == 1 or sum(sizes[index] for index in run) <= MAX_RUN_BYTES for run in runs)
    # The most urgent of what waits is always in the next read.
    left = list(queue)
    for run in runs:
        assert left[0] in run
        left = [index for index in left if index not in run]


def test_successors_follow_the_bytes_of_files(tiny_bundle: Path) -> None:
    entries = open_bundle(tiny_bundle).manifest.stored_experts
    following = next_in_file(entries)
    for at, after in enumerate(following):
        ends = (entries[at].file, entries[at].offset_bytes + entries[at].size_bytes)
        assert after == NONE or ends == (entries[after].file, entries[after].offset_bytes)
    files = {entry.file for entry in entries}
    assert following.count(NONE) == len(files)  # the last of each file
    assert [after for after in following if after != NONE] == [
        at for at, before in enumerate(previous_in_file(following)) if before != NONE
    ]


def test_experts_that_are_left_out_neither_follow_nor_are_followed(tiny_bundle: Path) -> None:
    first, *rest = open_bundle(tiny_bundle).manifest.experts[:3]
    gone = QuantSpec(PRUNED)
    left_out = replace(rest[0], size_bytes=0, gate=gone, up=gone, down=gone)
    after = replace(rest[1], offset_bytes=first.offset_bytes + first.size_bytes)
    assert next_in_file([first, left_out, after]) == [2, NONE, NONE]
