"""Files under names that no user gave: only those that moec wrote are replaced, and no link is followed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moec.manifests.errors import InputError
from moec.manifests.files.implied_names import check_implied, write_implied

MARK = re.compile(rb"\Aours ")


def test_a_new_file_and_one_with_the_mark_are_written(tmp_path: Path) -> None:
    for data in (b"ours 1", b"ours 2"):
        write_implied(tmp_path / "file", data, MARK)
        assert (tmp_path / "file").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.gate("G10")
@pytest.mark.parametrize("kind", ["file", "empty file", "link", "link to one of ours", "link to nothing", "folder"])
def test_what_somebody_else_made_stays(tmp_path: Path, kind: str) -> None:
    place, other = tmp_path / "file", tmp_path / "other"
    other.write_bytes(b"ours 1" if kind == "link to one of ours" else b"dear")
    if kind.startswith("link"):
        place.symlink_to(tmp_path / "nothing" if kind == "link to nothing" else other)
    elif kind == "folder":
        place.mkdir()
    else:
        place.write_bytes(b"" if kind == "empty file" else b"dear ours")
    before = other.read_bytes(), place.is_symlink()
    for work in (lambda: check_implied(place, MARK), lambda: write_implied(place, b"ours 2", MARK)):
        with pytest.raises(InputError, match="not replaced"):
            work()
    assert (other.read_bytes(), place.is_symlink()) == before and not (tmp_path / "nothing").exists()
