"""Whole pulls from a store in a folder: first, second, interrupted, refused."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from moec.manifests.bundle import DENSE_NAME
from moec.manifests.errors import (
    ChannelRefused,
    ChecksumMismatch,
    DeviceRefused,
    DoesNotFit,
    InputError,
    SignatureInvalid,
    StoreFailed,
    TryAgain,
)
from moec.shipping.installed.device import roll_back
from moec.shipping.installed.places import Places, locked
from moec.shipping.pull.fetch import FetchOptions, RateLimit
from moec.shipping.store.file_store import FileStore
from tests.shipping.devices import CountingStore, Device, Events
from tests.shipping.model_bundles import (
    NOW,
    channel_of,
    described,
    digests,
    push,
    put_bundle,
    put_channel,
    sha256_of,
    write_bundle,
)
from tests.shipping.signing_keys import signing_key

KEY = signing_key()


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three versions of a model; each has another expert than the one before, and the last another dense weight."""
    root = tmp_path_factory.mktemp("bundles")
    return [
        write_bundle(
            root / f"v{at}",
            version=lambda layer, expert, at=at: at * (layer == 1 and expert < at),
            dense_version=at // 2,
        )
        for at in range(3)
    ]


@pytest.fixture
def device(tmp_path: Path, bundles: list[Path]) -> Device:
    push(tmp_path / "store", bundles[0], KEY, 1)
    return Device(tmp_path / "device", tmp_path / "store")


def test_a_first_pull(device: Device, bundles: list[Path]) -> None:
    result = device.pull()
    assert result.outcome == "installed"
    assert device.current == digests(bundles[0])
    name = sha256_of(bundles[0])[:16]
    assert device.names == {name, f"{name}.sig", f"{name}.receipt.json", "current", "state.json", "lock"}
    (plan,) = device.events.plans
    assert plan.fetched_bytes == plan.total_bytes > 0 and plan.linked_bytes == plan.copied_bytes == plan.kept_bytes == 0
    assert device.events.done[-1] == (plan.total_bytes, plan.total_bytes) and device.events.tests == 1


def test_a_second_pull_does_nothing(device: Device, bundles: list[Path]) -> None:
    device.pull()
    before = {path: path.stat().st_mtime_ns for path in device.folder.rglob("*") if path.name != "lock"}
    shutil.rmtree(device.store / sha256_of(bundles[0]))
    result = device.pull()
    assert result.outcome == "unchanged" and device.events.plans == [] and device.events.tests == 0
    assert {path: path.stat().st_mtime_ns for path in device.folder.rglob("*") if path.name != "lock"} == before


def test_an_update_takes_what_is_there(device: Device, bundles: list[Path]) -> None:
    device.pull()
    push(device.store, bundles[1], KEY, 2)
    read = CountingStore(FileStore(device.store))
    device.pull(read)
    (plan,) = device.events.plans
    assert plan.linked_bytes and plan.copied_bytes and read.bytes_read == plan.fetched_bytes < plan.total_bytes / 4
    assert device.current == digests(bundles[1])
    old, new = (device.folder / sha256_of(bundle)[:16] for bundle in bundles[:2])
    assert os.readlink(device.folder / "previous") == old.name and os.readlink(device.folder / "current") == new.name
    assert os.path.samefile(old / DENSE_NAME, new / DENSE_NAME)
    assert digests(old) == digests(bundles[0])


def test_older_bundles_are_removed(device: Device, bundles: list[Path]) -> None:
    names = [sha256_of(bundle)[:16] for bundle in bundles]
    for at, bundle in enumerate(bundles):
        push(device.store, bundle, KEY, at + 1)
        device.pull()
    assert device.bundles == {names[1], names[2]}
    assert not [name for name in device.names if name.startswith(names[0])]
    device.pull(keep=0)
    assert device.bundles == {names[2]} and not os.path.lexists(device.folder / "previous")
    push(device.store, bundles[0], KEY, 4)
    device.pull(keep=0)
    assert device.bundles == {names[0]} and not os.path.lexists(device.folder / "previous")


def test_the_plan_alone_changes_nothing(device: Device, bundles: list[Path]) -> None:
    result = device.pull(plan_only=True)
    assert result.outcome == "planned" and not device.folder.exists()
    assert device.events.plans[0].fetched_bytes > 0
    device.pull()
    push(device.store, bundles[1], KEY, 2)
    before = {path: path.stat().st_mtime_ns for path in device.folder.rglob("*")}
    device.pull(plan_only=True)
    assert device.events.plans[0].copied_bytes > 0 and device.events.names == [sha256_of(bundles[1])[:16]]
    assert {path: path.stat().st_mtime_ns for path in device.folder.rglob("*")} == before
    push(device.store, bundles[0], KEY, 3)
    assert device.pull(plan_only=True).outcome == "unchanged"


def test_a_bundle_that_is_there_is_switched_to_without_a_fetch(device: Device, bundles: list[Path]) -> None:
    for at in (0, 1):
        push(device.store, bundles[at], KEY, at + 1)
        device.pull()
    push(device.store, bundles[0], KEY, 3)
    read = CountingStore(FileStore(device.store))
    device.pull(read)
    assert read.bytes_read == 0 and device.current == digests(bundles[0]) and device.events.tests == 1


def test_a_self_test_that_fails_keeps_the_old_bundle(device: Device, bundles: list[Path]) -> None:
    device.pull()
    push(device.store, bundles[1], KEY, 2)

    def wrong(folder: Path) -> None:
        raise ChecksumMismatch("other logits")

    device.check = wrong
    for _ in range(2):
        with pytest.raises(ChecksumMismatch, match="other logits"):
            device.pull()
        assert device.current == digests(bundles[0])
    read = CountingStore(FileStore(device.store))
    device.check = lambda folder: None
    assert device.pull(read).outcome == "installed" and read.bytes_read == 0


def test_a_changed_file_of_the_current_bundle_is_repaired(device: Device, bundles: list[Path]) -> None:
    device.pull()
    damaged = device.folder / "current" / "experts-00000.safetensors"
    with damaged.open("r+b") as file:
        file.seek(damaged.stat().st_size - 5)
        file.write(b"other")
    read = CountingStore(FileStore(device.store))
    assert device.pull(read).outcome == "installed"
    assert device.current == digests(bundles[0])
    assert 0 < read.bytes_read < damaged.stat().st_size, "the damaged expert and what lies between experts"
    assert len(device.bundles) == 1


def test_a_rolled_back_sequence_is_not_pulled_again(device: Device, bundles: list[Path]) -> None:
    device.pull()
    push(device.store, bundles[1], KEY, 2)
    device.pull()
    roll_back(device.folder, lambda folder: None)
    assert device.pull().outcome == "rolled back" and device.pull(plan_only=True).outcome == "rolled back"
    assert device.current == digests(bundles[0])
    push(device.store, bundles[1], KEY, 3)
    assert device.pull().outcome == "installed" and device.current == digests(bundles[1])


def test_an_older_channel_is_refused(device: Device, bundles: list[Path]) -> None:
    push(device.store, bundles[1], KEY, 5)
    device.pull()
    push(device.store, bundles[0], KEY, 4)
    with pytest.raises(ChannelRefused, match="has sequence 4, this device has seen 5") as told:
        device.pull()
    assert told.value.exit_code == 3 and device.current == digests(bundles[1])


def test_another_channel_has_sequences_of_its_own(device: Device, bundles: list[Path]) -> None:
    push(device.store, bundles[1], KEY, 5)
    device.pull()
    put_bundle(device.store, bundles[0], KEY)
    put_channel(device.store, channel_of([described(bundles[0])], 1, channel="beta"), KEY)
    assert device.pull(channel="beta").outcome == "installed"
    (device.store / "channel" / "beta.json").rename(device.store / "channel" / "stable.json")
    with pytest.raises(ChannelRefused, match="is the channel `beta`, expected `stable`"):
        device.pull()


def test_expiry_and_clocks(device: Device) -> None:
    device.now = NOW + timedelta(days=90)
    with pytest.raises(ChannelRefused, match="expired at 2027-02-23"):
        device.pull()
    assert not device.folder.exists()
    device.now = datetime(1970, 1, 1, tzinfo=timezone.utc)
    assert device.pull().outcome == "installed"
    assert "the clock of this device is before 2026-11-25" in device.events.warnings[0]


def test_keys(device: Device) -> None:
    own, other = signing_key().public, signing_key("other").public
    device.keys = [other]
    with pytest.raises(SignatureInvalid, match="is signed by none of the accepted keys"):
        device.pull()
    assert not device.folder.exists()
    device.keys = [other, own]
    assert device.pull().outcome == "installed"


def test_a_bundle_that_another_key_signed(device: Device, bundles: list[Path]) -> None:
    put_bundle(device.store, bundles[0], signing_key("other"))
    with pytest.raises(SignatureInvalid, match=r"\.sig` is signed by none of the accepted keys"):
        device.pull()
    assert "current" not in device.names and device.bundles == set()


def test_a_mix_of_two_bundles_is_refused(device: Device, bundles: list[Path]) -> None:
    first, second = (put_bundle(device.store, bundle, KEY) for bundle in bundles[:2])
    (first / "moec.json").unlink()
    shutil.copy(second / "moec.json", first / "moec.json")
    with pytest.raises(ChecksumMismatch, match="differs from the digest in the channel"):
        device.pull()
    (first / "moec.json").unlink()
    shutil.copy(bundles[0] / "moec.json", first / "moec.json")
    (first / "experts-00001.safetensors").unlink()
    shutil.copy(second / "experts-00001.safetensors", first / "experts-00001.safetensors")
    with pytest.raises(ChecksumMismatch, match=r"`experts-00001\.safetensors` of .* differs from its signed digest"):
        device.pull()
    shutil.copy(f"{second}.sig", f"{first}.sig")
    with pytest.raises(SignatureInvalid):
        device.pull()


def test_a_rate_counts_what_is_fetched(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[int]()
    monkeypatch.setattr(RateLimit, "take", lambda limit, size_bytes: taken.append(size_bytes))
    device.pull(fetch=FetchOptions(most_bytes_per_s=4_000_000))
    assert sum(taken) == device.events.plans[0].fetched_bytes


class HeldStore(CountingStore):
    """A store whose reads of weights are held in foreign code, so that `close` does not end them."""

    def __init__(self, store: FileStore) -> None:
        super().__init__(store)
        self.is_released, self.gave_up, self.late = threading.Event(), False, list[threading.Thread]()

    def read(self, path: str, start: int, end: int) -> Iterator[memoryview]:
        self.late.append(threading.current_thread())
        self.gave_up |= not self.is_released.wait(30)
        yield from super().read(path, start, end)


def test_an_interrupt_does_not_wait_for_the_store(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HeldStore(FileStore(device.store))

    def interrupt(events: Events, done_bytes: int, total_bytes: int) -> None:
        if store.late:
            raise KeyboardInterrupt

    monkeypatch.setattr(Events, "progress", interrupt)
    with pytest.raises(KeyboardInterrupt):
        device.pull(store)
    assert not store.gave_up and any(thread.is_alive() for thread in store.late)
    left = digests(next(device.folder.glob("*.partial")))
    store.is_released.set()
    for thread in store.late:
        thread.join()
    assert digests(next(device.folder.glob("*.partial"))) == left, "a thread that is left writes nothing"
    monkeypatch.undo()
    device.pull()


def test_what_a_store_lacks(device: Device, bundles: list[Path], tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match="has no channel `beta`"):
        device.pull(channel="beta")
    with pytest.raises(InputError, match="is no name of a channel"):
        device.pull(channel="../stable")
    folder = device.store / sha256_of(bundles[0])
    for path in (folder / "moec.json", Path(f"{folder}.sig"), folder / "experts-00001.safetensors"):
        path.rename(tmp_path / "aside")
        with pytest.raises((StoreFailed, SignatureInvalid), match=path.name):
            device.pull()
        (tmp_path / "aside").rename(path)
    assert "current" not in device.names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "board"}, "states `device` as board"),
        ({"total_bytes": 1 << 20}, "states `total_bytes` as 1048576"),
    ],
)
def test_a_channel_that_describes_another_bundle(
    device: Device, bundles: list[Path], changes: dict[str, object], message: str
) -> None:
    put_channel(device.store, channel_of([replace(described(bundles[0]), **changes)]), KEY)
    with pytest.raises(ChannelRefused, match=message):
        device.pull()


def test_another_model_and_another_moec(device: Device, bundles: list[Path], tmp_path: Path) -> None:
    device.pull()
    put_channel(device.store, channel_of([described(bundles[0])], 2, model="other-model"), KEY)
    with pytest.raises(ChannelRefused, match="has bundles of `other-model`, this folder those of `fleet-model`"):
        device.pull()
    with pytest.raises(ChannelRefused, match="states `model` as other-model"):
        Device(tmp_path / "new", device.store).pull()
    put_channel(device.store, channel_of([described(bundles[0])], 2, minimum_moec="0.3"), KEY)
    with pytest.raises(DeviceRefused, match=r"needs moec 0\.3, this is 0\.2\.0"):
        device.pull()
    put_channel(device.store, channel_of([described(bundles[0], memory_floor_bytes=1 << 50)], 2), KEY)
    with pytest.raises(DeviceRefused, match="of memory"):
        device.pull()


def test_a_disk_that_is_too_small(device: Device, bundles: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(device.store)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=12345))
    told = r"has 12\.1 KiB free, \d+\.\d MiB are needed: \d+\.\d .iB for the bundle, 4\.0 MiB for journal and receipt"
    with pytest.raises(DoesNotFit, match=told):
        device.pull()
    assert not [path for path in device.folder.rglob("*.safetensors")], "before the first byte of a weight"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_links(device: Device, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "symlink", refuse)
    with pytest.raises(InputError, match=r"the file system of `.*` \(.+\) has no symbolic links") as caught:
        device.pull()
    assert "file system with links" in (caught.value.hint or "")
    assert not [path for path in device.folder.rglob("*") if path.is_file() and path.stat().st_size > 100]


def test_folders_that_are_none_of_a_device(device: Device, tmp_path: Path) -> None:
    device.folder.mkdir()
    (device.folder / "letters.txt").write_text("dear")
    with pytest.raises(InputError, match=r"it holds `letters\.txt`"):
        device.pull()
    assert device.names == {"letters.txt"}
    file = Device(tmp_path / "file", device.store)
    file.folder.write_text("")
    with pytest.raises(InputError, match="is no folder for bundles"):
        file.pull()
    below = Device(tmp_path / "made" / "on" / "the" / "way", device.store)
    assert below.pull().outcome == "installed"
    mounted = Device(tmp_path / "disk", device.store)
    (mounted.folder / "lost+found").mkdir(parents=True)
    assert mounted.pull().outcome == "installed"


@pytest.mark.gate("G10")
@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
@pytest.mark.parametrize("ending", [".partial", ".removing", ""])
def test_what_is_no_folder_in_the_place_of_a_bundle(
    device: Device, bundles: list[Path], tmp_path: Path, ending: str, kind: str
) -> None:
    """Whatever `pull` would empty, write or remove there belongs to somebody else."""
    other, place = tmp_path / "other", device.folder / (sha256_of(bundles[0])[:16] + ending)
    (other / "below").mkdir(parents=True)
    (other / "below" / "letters.txt").write_text("dear")
    device.folder.mkdir()
    if kind == "file":
        place.write_text("dear")
    else:
        place.symlink_to(other if kind == "link" else tmp_path / "nothing")
    for work in (device.pull, lambda: device.pull(plan_only=True), lambda: roll_back(device.folder, lambda path: None)):
        with pytest.raises(InputError, match=rf"{place.name}` is a {kind.split()[-1]}, expected a folder"):
            work()
    assert (other / "below" / "letters.txt").read_text() == "dear"
    assert device.names == {place.name}


def test_two_pulls_at_once(device: Device) -> None:
    device.pull()
    with locked(Places(device.folder)), pytest.raises(TryAgain, match="another `moec pull`"):
        device.pull()


def test_a_disk_without_locks_is_named_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("moec.shipping.installed.places.fcntl.flock", refuse)
    with pytest.raises(InputError, match=r"cannot be locked: No locks available"), locked(Places(tmp_path)):
        raise AssertionError("held")


def test_an_open_bundle_outlives_its_folder(device: Device, bundles: list[Path]) -> None:
    from moec.runtime.bundle.open_bundle import open_bundle, verify_bundle

    device.pull()
    opened = open_bundle(device.folder / "current")
    for at in (1, 2):
        push(device.store, bundles[at], KEY, at + 1)
        device.pull(keep=0)
    assert sha256_of(bundles[0])[:16] not in device.names
    verify_bundle(opened)
    opened.close()


def test_what_an_abandoned_pull_left_is_removed(device: Device, bundles: list[Path]) -> None:
    with pytest.raises(StoreFailed):
        device.pull(CountingStore(FileStore(device.store), most_bytes=50_000))
    assert device.bundles == {f"{sha256_of(bundles[0])[:16]}.partial"}
    push(device.store, bundles[1], KEY, 2)
    device.pull()
    name = sha256_of(bundles[1])[:16]
    assert device.names == {name, f"{name}.sig", f"{name}.receipt.json", "current", "state.json", "lock"}


def test_a_store_that_gives_too_little(device: Device, bundles: list[Path]) -> None:
    class Short(CountingStore):
        def read(self, path: str, start: int, end: int) -> Iterator[memoryview]:
            yield from super().read(path, start, (start + end) // 2)

    with pytest.raises(StoreFailed, match=r"ends at byte \d+, expected"):
        device.pull(Short(FileStore(device.store)))
    assert device.pull().outcome == "installed" and device.current == digests(bundles[0])


def test_a_pull_goes_on_where_it_ended(device: Device, bundles: list[Path]) -> None:
    with pytest.raises(StoreFailed):
        device.pull(CountingStore(FileStore(device.store), most_bytes=50_000))
    read = CountingStore(FileStore(device.store))
    device.pull(read)
    (plan,) = device.events.plans
    assert plan.kept_bytes >= 40_000 and read.bytes_read == plan.fetched_bytes == plan.total_bytes - plan.kept_bytes
    assert device.current == digests(bundles[0])
