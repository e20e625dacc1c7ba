"""Files that a user names, or that lie next to a bundle: pipes and devices neither block nor fill the memory."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from moec.manifests.errors import InputError
from moec.runtime.bundle.archive.pack import pack_bundle
from moec.runtime.bundle.archive.unpack import unpack_bundle
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.trace import trace_file
from moec.runtime.trace.trace import Trace, TracedPass, TraceHeader
from moec.runtime.tuning.tune_file import bundle_sha256, read_tuning, tuning_path
from tests.runtime.faulty_source import InTime


@pytest.fixture
def own(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "own"))


def test_a_tuning_that_is_a_pipe_or_without_end(own: Path, in_time: InTime) -> None:
    path = tuning_path(own)
    assert read_tuning(own) is None
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is a pipe, expected a regular file"):
        in_time(lambda: read_tuning(own))
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="is a device, expected a regular file"):
        in_time(lambda: read_tuning(own))


def test_an_archive_that_is_a_pipe(own: Path, tmp_path: Path, in_time: InTime) -> None:
    archive, link = tmp_path / "a.moec", tmp_path / "link.moec"
    os.mkfifo(archive)
    with pytest.raises(InputError, match="is a pipe"):
        in_time(lambda: unpack_bundle(archive, tmp_path / "out"))
    archive.unlink()
    pack_bundle(own, archive)
    link.symlink_to(archive)
    unpack_bundle(link, tmp_path / "out")
    assert bundle_sha256(tmp_path / "out") == bundle_sha256(own)


def test_a_bundle_that_is_swapped_while_it_is_packed(
    own: Path, tmp_path: Path, in_time: InTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moec.runtime.bundle.archive import pack

    expected = bundle_sha256(own)

    def then_swap(path: Path) -> object:
        opened = open_bundle(path)
        for file in own.iterdir():
            file.unlink()
            os.mkfifo(file)
        return opened

    monkeypatch.setattr(pack, "open_bundle", then_swap)
    in_time(lambda: pack_bundle(own, tmp_path / "a.moec"))
    unpack_bundle(tmp_path / "a.moec", tmp_path / "out")
    assert bundle_sha256(tmp_path / "out") == expected


def test_a_trace_without_end(tmp_path: Path, in_time: InTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe may be named on purpose: it is read up to the limit."""
    monkeypatch.setattr(trace_file, "MAX_TRACE_BYTES", 10_000)
    each = TracedPass(1, ((0,),), ((),), (1,), (1,), (0,), 0, 0, 0)
    header = TraceHeader("0f" * 32, (1,), (1,), 1, "off", 1, 1, 1, 1)
    trace_file.write_trace(tmp_path / "whole", Trace(header, (each,)))
    first, line = (tmp_path / "whole").read_text().splitlines(keepends=True)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        try:
            with pipe.open("w", encoding="utf-8") as file:
                file.write(first)
                while True:
                    file.write(line)
        except BrokenPipeError:
            pass

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    with pytest.raises(InputError, match="expected at most 10000 bytes"):
        in_time(lambda: trace_file.read_trace(pipe))
    thread.join(60)
    assert not thread.is_alive()
