"""Pack and unpack: identical bytes, and both go on after any stop. Hostile archives: test_archive_hostile.py."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moec.manifests.bundle import DENSE_NAME, MANIFEST_NAME
from moec.manifests.codec import decode_manifest
from moec.manifests.errors import (
    BundleIncomplete,
    ChecksumMismatch,
    DiskFull,
    InputError,
    ManifestInvalid,
    OptionError,
)
from moec.runtime.bundle.archive import pack_bundle, unpack_bundle
from moec.runtime.bundle.archive.layout import (
    COMPRESSED,
    HEADER_BYTES,
    MIN_CHUNK_BYTES,
    STORED,
    members_of,
    places_of,
    read_index,
)
from moec.runtime.bundle.archive.pack import (
    LEVELS,
    MAX_STRONGEST_BYTES,
    SAMPLE_PIECE_BYTES,
    SAMPLE_PIECES,
    STORE_LEVEL,
    choose_level,
    sample,
)
from tests.runtime.tiny_bundle import content, write_archive, write_bundle

CHUNK = MIN_CHUNK_BYTES


@pytest.fixture
def own_bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "tiny-moec")


# Round trip


@pytest.mark.parametrize("chunk_bytes", [CHUNK, 8 * CHUNK, 8 << 20])
def test_unpacked_bytes_are_the_packed_ones(bundle: Path, tmp_path: Path, chunk_bytes: int) -> None:
    assert pack_bundle(bundle, tmp_path / "a.moecpack", chunk_bytes=chunk_bytes) == 0
    assert unpack_bundle(tmp_path / "a.moecpack", tmp_path / "out") == 0
    assert content(tmp_path / "out") == content(bundle)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.moecpack", "out"]


def test_equal_bundles_give_equal_archives(packed: bytes, tmp_path: Path) -> None:
    other = write_bundle(tmp_path / "another-name")
    os.utime(other / DENSE_NAME, (1, 1))
    pack_bundle(other, tmp_path / "b.moecpack", chunk_bytes=CHUNK)
    assert (tmp_path / "b.moecpack").read_bytes() == packed


def test_no_name_of_this_machine_is_inside(packed: bytes, bundle: Path) -> None:
    assert str(bundle.parent).encode() not in packed
    assert bundle.name.encode() not in packed


def test_progress_counts_raw_bytes_to_the_end(bundle: Path, tmp_path: Path) -> None:
    total = sum(map(len, content(bundle).values()))
    for act in (
        lambda report: pack_bundle(bundle, tmp_path / "a", report, chunk_bytes=CHUNK),
        lambda report: unpack_bundle(tmp_path / "a", tmp_path / "out", report),
    ):
        calls: list[tuple[int, int]] = []
        act(lambda done, all_bytes, calls=calls: calls.append((done, all_bytes)))
        assert [done for done, _ in calls] == sorted({done for done, _ in calls})
        assert {all_bytes for _, all_bytes in calls} == {total}
        assert calls[-1] == (total, total)


def test_members_are_stored_when_they_do_not_shrink(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "a"
    pack_bundle(bundle, path)
    manifest = (bundle / MANIFEST_NAME).read_bytes()
    with path.open("rb") as file:
        index = read_index(file, "a", path.stat().st_size)
    members = members_of(decode_manifest(manifest, MANIFEST_NAME), len(manifest))
    places = {place.member: place for place in places_of(index, members)}
    config = places["config.json"]
    assert config.chunk.method == COMPRESSED and config.chunk.stored_bytes < config.raw_bytes / 4
    assert "generation_config.json" not in places and places[MANIFEST_NAME].chunk.method == COMPRESSED
    assert any(place.chunk.method == STORED for place in places.values())


def test_the_level_follows_from_what_a_sample_saves() -> None:
    noise = random.Random(1).randbytes(100_000)
    assert choose_level(noise, 100_000) == STORE_LEVEL
    assert choose_level(b"", 0) == STORE_LEVEL
    assert choose_level(bytes(100_000), 100_000) == LEVELS[0]
    numbers = random.Random(2)
    text = "".join(f'{{"kl": {numbers.random():.3f}, "n": {numbers.randrange(99)}}},' for _ in range(10_000)).encode()
    assert choose_level(text, MAX_STRONGEST_BYTES) == LEVELS[2]
    assert choose_level(text, MAX_STRONGEST_BYTES + 1) in LEVELS[:2]


def test_a_sample_is_spread_over_the_file(tmp_path: Path) -> None:
    size = 3 * SAMPLE_PIECES * SAMPLE_PIECE_BYTES
    path = tmp_path / "file"
    path.write_bytes(bytes(size - 1) + b"x")
    with path.open("rb") as file:
        data = sample(file, size)
    assert len(data) == SAMPLE_PIECES * SAMPLE_PIECE_BYTES
    assert data[-1:] == b"x"


# Pack refuses


def test_a_damaged_bundle_is_not_packed(own_bundle: Path, tmp_path: Path) -> None:
    path = own_bundle / "experts-00001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ChecksumMismatch, match=r"experts-00001\.safetensors"):
        pack_bundle(own_bundle, tmp_path / "a")
    assert [item.name for item in tmp_path.iterdir()] == ["tiny-moec"]


@pytest.mark.parametrize("change", ["missing", "extra", "shorter", "no manifest", "uncertified"])
def test_an_incomplete_bundle_is_not_packed(own_bundle: Path, tmp_path: Path, change: str) -> None:
    if change == "missing":
        (own_bundle / "quality.json").unlink()
    elif change == "extra":
        (own_bundle / "thumbs.db").write_bytes(b"x")
    elif change == "shorter":
        (own_bundle / "config.json").write_bytes(b"{}")
    elif change == "no manifest":
        (own_bundle / MANIFEST_NAME).unlink()
    else:
        shutil.rmtree(own_bundle)
        write_bundle(own_bundle, certified=False)
    with pytest.raises(BundleIncomplete):
        pack_bundle(own_bundle, tmp_path / "a")
    assert [item.name for item in tmp_path.iterdir()] == ["tiny-moec"]


def test_an_archive_is_not_overwritten_unasked(bundle: Path, packed: bytes, tmp_path: Path) -> None:
    path = write_archive(tmp_path, b"precious")
    with pytest.raises(OptionError, match="exists"):
        pack_bundle(bundle, path)
    assert path.read_bytes() == b"precious"
    pack_bundle(bundle, path, overwrite=True, chunk_bytes=CHUNK)
    assert path.read_bytes() == packed


def test_places_that_cannot_take_an_archive(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="inside the bundle"):
        pack_bundle(bundle, bundle / "a")
    with pytest.raises(OptionError, match="exists"):
        pack_bundle(bundle, tmp_path, overwrite=True)
    with pytest.raises(InputError, match="absent"):
        pack_bundle(bundle, tmp_path / "absent" / "a")
    with pytest.raises(BundleIncomplete):
        pack_bundle(tmp_path / "absent", tmp_path / "a")


@pytest.mark.parametrize("act", [pack_bundle, unpack_bundle])
def test_a_disk_that_is_too_small_is_told_before(
    bundle: Path, packed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[..., Any]
) -> None:
    source = bundle if act is pack_bundle else write_archive(tmp_path, packed)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(DiskFull, match="are needed"):
        act(source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_disk_that_fills_up_leaves_no_archive(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="full"):
        pack_bundle(bundle, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


# Both resume


class Stop(BaseException):
    """The run is killed."""


def stop_after(steps: int) -> Callable[[int, int], None]:
    left = [steps]

    def report(done: int, total: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Stop

    return report


@pytest.mark.parametrize("packs", [False, True])
def test_an_interrupted_run_goes_on_where_it_stopped(bundle: Path, packed: bytes, tmp_path: Path, packs: bool) -> None:
    """What a stopped pack left is no archive."""
    source, kept = bundle if packs else write_archive(tmp_path, packed), [0]
    act = partial(pack_bundle, chunk_bytes=CHUNK) if packs else unpack_bundle
    for steps in range(1, 1000):
        target = tmp_path / f"out-{steps}"
        partial_target = target.with_name(target.name + ".partial")
        try:
            act(source, target, stop_after(steps))
        except Stop:
            assert not target.exists()
        else:
            break
        if packs and steps == 12:
            with pytest.raises(ManifestInvalid):
                unpack_bundle(partial_target, tmp_path / "out")
        kept_bytes = act(source, target)
        assert kept_bytes >= kept[-1] and not partial_target.exists()
        assert target.read_bytes() == packed if packs else content(target) == content(bundle)
        kept.append(kept_bytes)
    assert len(kept) > 10
    files = content(bundle)
    assert kept[-1] == sum(map(len, files.values())) - (0 if packs else len(files[MANIFEST_NAME]))


def test_what_a_killed_pack_left_is_trusted_by_digest_alone(bundle: Path, packed: bytes, tmp_path: Path) -> None:
    archive, partial = tmp_path / "a", tmp_path / "a.partial"
    with pytest.raises(Stop):
        pack_bundle(bundle, archive, stop_after(12), chunk_bytes=CHUNK)
    left = partial.read_bytes()
    damages = [left[:size] for size in (0, 8, 40, HEADER_BYTES + 3, len(left) - 1)]
    damages += [
        left[:at] + b"\xff" + left[at + 1 :] for at in (20, 50, HEADER_BYTES + 1, HEADER_BYTES + 70, len(left) - 9)
    ]
    damages += [packed, left + bytes(100_000)]
    for damaged in damages:
        partial.write_bytes(damaged)
        pack_bundle(bundle, archive, overwrite=True, chunk_bytes=CHUNK)
        assert archive.read_bytes() == packed


def test_something_else_in_the_way_of_a_pack_is_left_alone(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "a.partial").write_bytes(b"thesis")
    with pytest.raises(OptionError, match="in the way"):
        pack_bundle(bundle, tmp_path / "a")
    assert (tmp_path / "a.partial").read_bytes() == b"thesis"
    (tmp_path / "b.partial").mkdir()
    with pytest.raises(InputError, match=r"b\.partial"):
        pack_bundle(bundle, tmp_path / "b")
    os.mkfifo(tmp_path / "c.partial")
    with pytest.raises(OptionError, match="in the way"):
        pack_bundle(bundle, tmp_path / "c")


def test_what_was_left_is_trusted_by_digest_alone(bundle: Path, packed: bytes, tmp_path: Path) -> None:
    archive, partial = write_archive(tmp_path, packed), tmp_path / "out.partial"
    partial.mkdir()
    original = (bundle / DENSE_NAME).read_bytes()
    (partial / DENSE_NAME).write_bytes(original[:100] + b"?" + original[101:] + b"too long")
    (partial / "config.json").write_bytes(b"")
    (partial / MANIFEST_NAME).write_bytes(b"of another bundle")
    (partial / f".{MANIFEST_NAME}.writing").write_bytes(b"half")
    kept_bytes = unpack_bundle(archive, tmp_path / "out")
    assert content(tmp_path / "out") == content(bundle)
    assert 0 < kept_bytes < len(original)


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_folder_of_something_else_is_not_touched(packed: bytes, tmp_path: Path, kind: str) -> None:
    archive, partial = write_archive(tmp_path, packed), tmp_path / "out.partial"
    (tmp_path / "elsewhere").write_bytes(b"precious")
    partial.mkdir()
    if kind == "file":
        (partial / "thesis").write_bytes(b"")
    elif kind == "folder":
        (partial / "config.json").mkdir()
    else:
        (partial / "config.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OptionError, match="not part of this archive"):
        unpack_bundle(archive, tmp_path / "out")
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"
    assert len(list(partial.iterdir())) == 1


def test_a_link_in_place_of_the_folder_is_refused(packed: bytes, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is a link, expected a folder"):
        unpack_bundle(write_archive(tmp_path, packed), tmp_path / "out")


def test_an_existing_target_and_an_absent_archive(packed: bytes, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(OptionError, match="exists"):
        unpack_bundle(write_archive(tmp_path, packed), tmp_path / "out")
    with pytest.raises(InputError, match="absent"):
        unpack_bundle(tmp_path / "absent", tmp_path / "new")
