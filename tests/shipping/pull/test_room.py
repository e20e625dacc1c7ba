"""The disk of a device: room that a pull makes, and foreign things in its folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moec.manifests.errors import DiskFull, InputError
from moec.shipping.store.file_store import FileStore
from tests.shipping.devices import CountingStore, Device
from tests.shipping.model_bundles import digests, push, sha256_of, write_bundle
from tests.shipping.signing_keys import signing_key

KEY = signing_key()


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three versions of a model; each has another expert than the one before.

    The last one has the dense weights of the first one.
    """
    root = tmp_path_factory.mktemp("bundles")
    return [
        write_bundle(
            root / f"v{at}",
            version=lambda layer, expert, at=at: at * (layer == 1 and expert < at),
            dense_version=at % 2,
        )
        for at in range(3)
    ]


@pytest.fixture
def device(tmp_path: Path, bundles: list[Path]) -> Device:
    """A device with two bundles, and a store with a third one."""
    device = Device(tmp_path / "device", tmp_path / "store")
    for at, bundle in enumerate(bundles):
        push(device.store, bundle, KEY, at + 1)
        if at < 2:
            device.pull()
    return device


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch, device: Device) -> Callable[[int], None]:
    """Let the disk have so many bytes more than the device's folder takes now."""
    real = shutil.disk_usage(device.store)

    def used() -> int:
        found = {each.stat().st_ino: each.stat() for each in device.folder.rglob("*") if each.is_file()}
        return sum(each.st_blocks * 512 for each in found.values())

    def set_limit(free_bytes: int) -> None:
        most = used() + free_bytes
        monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=most - used()))

    return set_limit


def needed_bytes(device: Device) -> int:
    """Return the bytes that the next pull writes."""
    device.pull(plan_only=True)
    plan = device.events.plans[0]
    return plan.copied_bytes + plan.fetched_bytes


def test_an_update_takes_the_place_of_the_previous_bundle(
    device: Device, bundles: list[Path], limit: Callable[[int], None]
) -> None:
    planned = needed_bytes(device)
    limit(planned + (4 << 20) - 1)
    store = CountingStore(FileStore(device.store))
    assert device.pull(store).outcome == "installed"
    assert 0 < store.bytes_read <= planned, "the dense weights of the removed bundle are not fetched"
    assert device.current == digests(bundles[2])
    assert device.bundles == {sha256_of(bundle)[:16] for bundle in bundles[1:]}, "there is one to return to"


def test_nothing_is_removed_if_that_is_not_enough(
    device: Device, bundles: list[Path], limit: Callable[[int], None]
) -> None:
    limit(9)
    before = device.bundles
    with pytest.raises(DiskFull) as caught:
        device.pull()
    assert caught.value.hint == "free space, or keep no previous bundle: --keep 0"
    assert device.bundles - before == {sha256_of(bundles[2])[:16] + ".partial"} and before <= device.bundles


def test_the_hint_of_a_first_install(tmp_path: Path, device: Device, limit: Callable[[int], None]) -> None:
    limit(0)
    with pytest.raises(DiskFull) as caught:
        Device(tmp_path / "other", device.store).pull()
    assert caught.value.hint == "free space"


@pytest.mark.parametrize("link", ["current", "previous"])
def test_a_folder_in_place_of_a_link(device: Device, tmp_path: Path, link: str) -> None:
    """It is refused before anything is read from the store."""
    (device.folder / link).unlink()
    (device.folder / link).mkdir()
    with pytest.raises(InputError, match=f"{link}` is no link that `moec pull` has made"):
        device.pull()
    assert device.events.names == []


def test_folders_in_a_growing_bundle(device: Device, bundles: list[Path]) -> None:
    partial = device.folder / (sha256_of(bundles[2])[:16] + ".partial")
    (partial / "config.json" / "deep").mkdir(parents=True)
    (partial / "other").mkdir()
    (partial / "other" / "file").write_text("")
    device.pull()
    assert device.current == digests(bundles[2])
