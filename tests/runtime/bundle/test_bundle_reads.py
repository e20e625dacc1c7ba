"""Reading parts of bundle files: direct where it can be, the same bytes either way."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from moec.manifests.bundle import DENSE_NAME
from moec.manifests.errors import BundleIncomplete
from moec.runtime.bundle.open_bundle import open_bundle, verify_bundle


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
