"""Bytes from installed bundles, where links, copies in the kernel or an exchange of folders are not possible."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from moec.manifests.bundle import DENSE_NAME, experts_file_name
from moec.manifests.files.output_file import FileSystem
from moec.shipping.pull.installing import exchange
from moec.shipping.store.file_store import FileStore
from tests.shipping.devices import CountingStore, Device
from tests.shipping.model_bundles import Shape, digests, push, sha256_of, write_bundle
from tests.shipping.signing_keys import signing_key


@pytest.fixture
def device(tmp_path: Path) -> Device:
    """A device with a bundle, and a store with a second one: another expert, and another small file."""
    first = write_bundle(tmp_path / "first")
    second = write_bundle(tmp_path / "second", version=lambda layer, expert: int(layer == 1 and expert == 2), note="2")
    device = Device(tmp_path / "device", tmp_path / "store")
    push(device.store, first, signing_key(), 1)
    device.pull()
    push(device.store, second, signing_key(), 2)
    return device


def pulled(device: Device, **request: Any) -> int:
    """Pull the second bundle, and return the bytes that came from the store."""
    assert device.pull(**request).outcome == "installed"
    assert device.current == digests(device.store.parent / "second")
    return device.events.plans[0].fetched_bytes


def test_without_links(device: Device) -> None:
    class NoLinks(FileSystem):
        def link(self, source: Path, target: Path) -> None:
            raise OSError(errno.EPERM, "no links")

    fetched = pulled(device, system=NoLinks())
    (plan,) = device.events.plans
    assert plan.linked_bytes == 0 and fetched < plan.total_bytes / 4
    assert (device.folder / "current" / DENSE_NAME).stat().st_nlink == 1


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSYS, errno.EINVAL])
def test_without_copies_in_the_kernel(device: Device, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refused(*rest: object) -> int:
        raise OSError(number, "no copies")

    monkeypatch.setattr(os, "copy_file_range", refused)
    pulled(device)
    assert device.events.plans[0].copied_bytes > 0


def test_on_another_system(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "copy_file_range")
    pulled(device)
    assert device.events.plans[0].copied_bytes > 0


def test_copies_that_end_early(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.copy_file_range
    monkeypatch.setattr(os, "copy_file_range", lambda a, b, size, *rest: real(a, b, min(size, 1000), *rest))
    pulled(device)
    monkeypatch.setattr(os, "copy_file_range", lambda *rest: 0)
    push(device.store, device.store.parent / "first", signing_key(), 3)
    device.pull(keep=0)
    assert device.current == digests(device.store.parent / "first")


def test_a_damaged_source_is_not_copied(device: Device) -> None:
    source = device.folder / "current" / experts_file_name(1)
    with source.open("r+b") as file:
        file.seek(source.stat().st_size - 1)
        file.write(b"\1")
    pulled(device)
    installed = device.folder / sha256_of(device.store.parent / "first")[:16]
    assert digests(installed)[source.name] != digests(device.store.parent / "first")[source.name]


def test_a_source_that_cannot_be_used(device: Device) -> None:
    (device.folder / "current" / experts_file_name(1)).unlink()
    pulled(device, keep=0)
    push(device.store, device.store.parent / "first", signing_key(), 3)
    (device.folder / "current" / "moec.json").write_text("{}")
    device.pull()
    plan = device.events.plans[0]
    assert plan.fetched_bytes == plan.total_bytes


def test_a_link_is_never_written_through(device: Device, tmp_path: Path) -> None:
    """A growing folder of a killed pull may have links where this pull has to write."""
    name = sha256_of(tmp_path / "second")[:16]
    partial = device.folder / f"{name}.partial"
    partial.mkdir()
    for path in (device.folder / "current").iterdir():
        os.link(path, partial / path.name)
    (partial / "left").mkdir()
    (partial / "left").rmdir()
    (partial / "more").write_text("left by something else")
    before = digests(device.folder / "current")
    old = device.folder / os.readlink(device.folder / "current")
    pulled(device)
    assert digests(old) == before


@pytest.mark.parametrize("is_reversed", [False, True])
def test_one_dense_weight_changes(tmp_path: Path, is_reversed: bool) -> None:
    """With another order in the file, copies go to wrong places. The digest finds that, and the file is fetched."""
    shape = Shape(hidden=256, width=32, vocabulary=512)
    changed = ["layers.1.attention_norm"]
    first = write_bundle(tmp_path / "first", shape)
    second = write_bundle(tmp_path / "second", shape, changed_dense=changed, has_dense_reversed=is_reversed)
    device = Device(tmp_path / "device", tmp_path / "store")
    push(device.store, first, signing_key(), 1)
    device.pull()
    push(device.store, second, signing_key(), 2)
    counted = CountingStore(FileStore(device.store))
    pulled(device, store=counted)
    size = (second / DENSE_NAME).stat().st_size
    assert device.events.plans[0].fetched_bytes < size / 10
    assert (counted.bytes_read >= size) == is_reversed


@pytest.mark.parametrize("is_able", [True, False])
def test_folders_are_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_able: bool) -> None:
    if not is_able:
        monkeypatch.setattr(ctypes, "CDLL", lambda *rest, **named: object())
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    exchange(tmp_path / "new", tmp_path / "old", tmp_path / "aside", FileSystem())
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["new"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["old"]
    assert not (tmp_path / "aside").exists()


def test_what_others_put_into_the_folder_stays(device: Device) -> None:
    for name in ("own.partial", "own.removing"):
        (device.folder / name).mkdir()
    for name in (".own.writing", "own.journal", "notes.txt"):
        (device.folder / name).touch()
    pulled(device, keep=0)
    assert {"own.partial", "own.removing", ".own.writing", "own.journal", "notes.txt"} <= device.names
