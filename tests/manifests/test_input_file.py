"""`manifests/files/input_file.py`: regular files alone, within a limit, and nothing that blocks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from moec.manifests.files.input_file import UnreadableFile, open_input, read_descriptor, read_input


def test_a_regular_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (3 << 20))
    assert read_input(path, 3 << 20) == b"x" * (3 << 20)


def test_reading_does_not_move_the_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    descriptor = open_input(path)
    try:
        assert read_descriptor(descriptor, 3) == read_descriptor(descriptor, 3) == b"abc"
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0
    finally:
        os.close(descriptor)


def test_a_byte_over_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcd")
    with pytest.raises(UnreadableFile, match="has 4 bytes, more than the limit of 3"):
        read_input(path, 3)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("follow_links", [False, True])
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (os.mkfifo, "a pipe"),
        (Path.mkdir, "a folder"),
        (lambda path: path.symlink_to("/dev/zero"), "a (device|link)"),
        (_socket, "a socket"),
    ],
)
def test_other_kinds_are_named_and_nothing_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], found: str, follow_links: bool
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    path = Path("file")
    make(path)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(UnreadableFile, match=found):
        read_input(path, 100, follow_links=follow_links)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_link_is_followed_only_where_that_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_input(tmp_path / "link", 3, follow_links=True) == b"abc"
    with pytest.raises(UnreadableFile, match="is a link"):
        read_input(tmp_path / "link", 3)


@pytest.mark.parametrize("name", ["missing", "x" * 300, "nul\0byte"])
def test_a_name_that_leads_nowhere_is_a_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnreadableFile, match=r"is missing|cannot be read"):
        read_input(tmp_path / name, 100)
