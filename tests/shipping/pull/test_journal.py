"""The journal: what a killed pull finds again, what a power cut voids, and lines that are cut. Its ranges of bytes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.shipping.pull.journal import Intervals, Journal, boot_name, finished_ranges

DIGEST = "ab" * 32
SIZE = 40
places = st.integers(0, SIZE)


def ranges(path: Path, boot: str = "one", digest: str = DIGEST) -> dict[int, list[tuple[int, int]]]:
    """Finished ranges below byte 1000 of each file."""
    found = {}
    for file, done in finished_ranges(path, digest, boot).items():
        gaps = [(0, 0), *done.missing(1000), (1000, 1000)]
        found[file] = [(last, first) for (_, last), (first, _) in itertools.pairwise(gaps) if last < first]
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_ranges_are_found_again(path: Path) -> None:
    journal = Journal(path, DIGEST, "one")
    journal.finish(0, 0, 100)
    journal.finish(3, 50, 60)
    journal.finish(0, 100, 120)
    journal.finish(4, 0, 10)
    journal.reset(3)
    journal.finish(3, 7, 9)
    journal.close()
    assert ranges(path) == {0: [(0, 120)], 3: [(7, 9)], 4: [(0, 10)]}
    again = Journal(path, DIGEST, "one")
    again.finish(0, 120, 130)
    again.close()
    assert ranges(path)[0] == [(0, 130)]


def test_after_a_restart_only_durable_ranges_count(path: Path) -> None:
    journal = Journal(path, DIGEST, "one")
    journal.finish(0, 0, 100)
    lines = journal.line_count
    journal.finish(0, 100, 200)
    journal.settle(lines)
    journal.close()
    assert ranges(path, "one") == {0: [(0, 200)]}
    assert ranges(path, "two") == {0: [(0, 100)]}
    assert ranges(path, "") == {0: [(0, 100)]}
    again = Journal(path, DIGEST, "two")
    again.finish(1, 0, 5)
    again.close()
    assert ranges(path, "two") == {0: [(0, 100)], 1: [(0, 5)]}
    assert ranges(path, "three") == {0: [(0, 100)]}


def test_every_cut_of_the_journal_is_read(path: Path) -> None:
    journal = Journal(path, DIGEST, "one")
    for at in range(3):
        journal.finish(at, 100 * at, 100 * at + 99)
    journal.settle(journal.line_count)
    journal.reset(1)
    journal.close()
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        for file, found in ranges(path).items():
            assert found == [(100 * file, 100 * file + 99)]
        journal = Journal(path, DIGEST, "one")
        journal.finish(7, 1, 2)
        journal.close()
        assert ranges(path)[7] == [(1, 2)]


@pytest.mark.parametrize(
    "data", [b"", b"moec-journal 1 other\nF 0 0 9\n", b"\xff\n", b"F 0 0 9\n", b"moec-journal 2 x\n"]
)
def test_a_journal_of_something_else_is_begun_anew(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    assert ranges(path) == {}
    Journal(path, DIGEST, "one").close()
    assert path.read_text() == f"moec-journal 1 {DIGEST}\nB one\n"


def test_odd_lines_are_ignored(path: Path) -> None:
    path.write_text(f"moec-journal 1 {DIGEST}\nB one\nF 0 9 5\nF x 0 1\nF 0 0 9F 0 9 18\nS 99999\nF 1 2 3\n\n")
    assert ranges(path) == {0: [], 1: [(2, 3)]}


def test_the_name_of_a_boot(tmp_path: Path) -> None:
    assert boot_name() == boot_name() != ""
    assert boot_name(tmp_path / "none") == ""
    (tmp_path / "odd").write_text("a b\nc")
    assert boot_name(tmp_path / "odd") == ""


@given(st.lists(st.tuples(places, places), max_size=12), places, places)
def test_intervals_are_a_set_of_bytes(added: list[tuple[int, int]], start: int, end: int) -> None:
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
