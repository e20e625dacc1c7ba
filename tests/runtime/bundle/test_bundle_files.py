"""Files of a bundle and files that a user names: ranges, digests, pipes and devices."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from moec.manifests.bundle import DENSE_NAME, EVICTION_NAME
from moec.manifests.errors import BundleIncomplete, ChecksumMismatch, InputError
from moec.runtime.bundle.archive.pack import pack_bundle
from moec.runtime.bundle.archive.unpack import unpack_bundle
from moec.runtime.bundle.eviction_weights import fitted_weights
from moec.runtime.bundle.open_bundle import open_bundle, verify_bundle
from moec.runtime.trace import trace_file
from moec.runtime.trace.trace import Trace, TracedPass, TraceHeader
from moec.runtime.tuning.tune_file import bundle_sha256, read_tuning, tuning_path
from tests.listed_file import add_listed
from tests.runtime.faulty_source import InTime


@pytest.mark.parametrize("flag", [getattr(os, "O_DIRECT", 0), 0])
@pytest.mark.parametrize("offset", [0, 1, mmap.PAGESIZE])
def test_any_range_is_what_the_file_holds(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, flag: int, offset: int
) -> None:
    monkeypatch.setattr(os, "O_DIRECT", flag, raising=False)
    bundle, whole = open_bundle(tiny_bundle), (tiny_bundle / DENSE_NAME).read_bytes()
    for size in (1, mmap.PAGESIZE, 3 * mmap.PAGESIZE + 5):
        place = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        bundle.read_into(DENSE_NAME, offset, place)
        assert place.tobytes() == whole[offset : offset + size]


@pytest.mark.parametrize("piece_bytes", [1 << 20, 4096, 1000])
def test_verify_reads_every_byte_once(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """Parts that begin and end inside a piece of what is read, and in several."""
    bundle, read, seen, plain = open_bundle(tiny_bundle), dict[int, int](), list[tuple[int, int]](), os.pread

    def read_counted(descriptor: int, size: int, offset: int) -> bytes:
        assert size <= piece_bytes and offset == read.get(descriptor, 0)
        data = plain(descriptor, size, offset)
        read[descriptor] = offset + len(data)
        return data

    monkeypatch.setattr(os, "pread", read_counted)
    monkeypatch.setattr("moec.runtime.bundle.open_bundle.CHUNK_BYTES", piece_bytes)
    verify_bundle(bundle, lambda *done: seen.append(done))
    files = bundle.manifest.files
    assert read == {bundle.files[entry.name].descriptor: entry.size_bytes for entry in files}
    assert seen[-1] == (sum(entry.size_bytes for entry in files),) * 2


def test_a_file_that_ends_early_is_named(tiny_bundle: Path) -> None:
    bundle, size = open_bundle(tiny_bundle), (tiny_bundle / DENSE_NAME).stat().st_size
    with pytest.raises(BundleIncomplete, match=DENSE_NAME):
        bundle.read_into(DENSE_NAME, 0, np.frombuffer(mmap.mmap(-1, size + 1), np.uint8))


WEIGHTS = b'{"hobbit":{"fld":0.25,"lfu":0.5,"lhu":0,"lru":0.25}}'


def test_a_changed_byte_is_refused_where_digests_are_checked(copied: Path) -> None:
    add_listed(copied, EVICTION_NAME, WEIGHTS)
    (copied / EVICTION_NAME).write_bytes(WEIGHTS.replace(b'"fld":0.25,"lfu":0.5', b'"fld":0.5,"lfu":0.25'))
    with open_bundle(copied) as opened:
        with pytest.raises(ChecksumMismatch, match=EVICTION_NAME):
            fitted_weights(opened)
        assert fitted_weights(opened, verify=False) == "0.25,0.25,0,0.5"


def test_a_tuning_that_is_a_pipe_or_without_end(copied: Path, in_time: InTime) -> None:
    path = tuning_path(copied)
    assert read_tuning(copied) is None
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is a pipe, expected a regular file"):
        in_time(lambda: read_tuning(copied))
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="is a device, expected a regular file"):
        in_time(lambda: read_tuning(copied))


def test_an_archive_that_is_a_pipe(copied: Path, tmp_path: Path, in_time: InTime) -> None:
    archive, link = tmp_path / "a.moec", tmp_path / "link.moec"
    os.mkfifo(archive)
    with pytest.raises(InputError, match="is a pipe"):
        in_time(lambda: unpack_bundle(archive, tmp_path / "out"))
    archive.unlink()
    pack_bundle(copied, archive)
    link.symlink_to(archive)
    unpack_bundle(link, tmp_path / "out")
    assert bundle_sha256(tmp_path / "out") == bundle_sha256(copied)


def test_a_bundle_that_is_swapped_while_it_is_packed(
    copied: Path, tmp_path: Path, in_time: InTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moec.runtime.bundle.archive import pack

    expected = bundle_sha256(copied)

    def then_swap(path: Path) -> object:
        opened = open_bundle(path)
        for file in copied.iterdir():
            file.unlink()
            os.mkfifo(file)
        return opened

    monkeypatch.setattr(pack, "open_bundle", then_swap)
    in_time(lambda: pack_bundle(copied, tmp_path / "a.moec"))
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
