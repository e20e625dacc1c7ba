"""State, receipts, links and rollback of a device's folder."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moec.manifests.bundle import DENSE_NAME
from moec.manifests.errors import ChecksumMismatch, InputError
from moec.manifests.files.output_file import FileSystem
from moec.shipping.installed.device import installed_bundles, roll_back
from moec.shipping.installed.places import Places
from moec.shipping.installed.receipt import NO_RECEIPT, difference, make_receipt, read_receipt, write_receipt
from moec.shipping.installed.state import BundleState, ChannelState, DeviceState, read_state, write_state
from moec.shipping.store.file_store import FileStore
from tests.shipping.devices import CountingStore, Device
from tests.shipping.model_bundles import digests, push, sha256_of, write_bundle
from tests.shipping.signing_keys import signing_key

KEY = signing_key()
STATE = DeviceState(
    1,
    "model",
    (ChannelState("stable", 9, 3),),
    (BundleState("ab" * 32, "host", "stable", 9, "2026-11-26T12:00:00Z"),),
)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("bundles")
    return [write_bundle(root / f"v{at}", note=str(at)) for at in range(4)]


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path / "device", tmp_path / "store")


def pull_all(device: Device, bundles: list[Path], keep: int = 1) -> list[str]:
    """Pull one after the other. Returns the names of the folders."""
    for at, bundle in enumerate(bundles):
        push(device.store, bundle, KEY, at + 1)
        device.pull(keep=keep)
    return [sha256_of(bundle)[:16] for bundle in bundles]


def damage(path: Path) -> None:
    """Change a byte of a file, which keeps its size."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_state_is_written_and_read(tmp_path: Path) -> None:
    assert read_state(Places(tmp_path)) is None
    write_state(Places(tmp_path), STATE, FileSystem())
    assert read_state(Places(tmp_path)) == STATE
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"version": 1', '"version": 2'),
        ('"highest_sequence": 9', '"highest_sequence": 2'),
        ('"highest_sequence": 9', '"highest_sequence": "9"'),
        ('"sequence": 9', '"sequence": 0'),
        ('"stable"', '"../stable"'),
        ("abab", "ABAB"),
        ("2026-11-26", "yesterday"),
        ('"model": "model"', '"model": "model", "more": 1'),
        ("}\n", ""),
    ],
)
def test_a_damaged_state_is_an_error(tmp_path: Path, old: str, new: str) -> None:
    places = Places(tmp_path)
    write_state(places, STATE, FileSystem())
    text = places.state.read_text()
    assert old in text
    places.state.write_text(text.replace(old, new))
    with pytest.raises(InputError, match=r"state\.json` is damaged"):
        read_state(places)


def test_a_state_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "state.json").mkdir()
    with pytest.raises(InputError, match=r"state\.json` is a folder"):
        read_state(Places(tmp_path))


def test_a_receipt_finds_changes(tmp_path: Path, bundles: list[Path]) -> None:
    folder, path = Path(shutil.copytree(bundles[0], tmp_path / "bundle")), tmp_path / "receipt.json"
    digest, names = sha256_of(folder), os.listdir(folder)
    assert difference(folder, read_receipt(path)) == NO_RECEIPT
    write_receipt(path, make_receipt(folder, digest, names), FileSystem())
    receipt = read_receipt(path)
    assert receipt is not None and difference(folder, receipt) is None
    os.link(folder / "config.json", tmp_path / "second name")
    assert difference(folder, receipt) is None, "another bundle may link a file"
    (folder / "more").touch()
    assert difference(folder, receipt) == "`more` was added"
    (folder / "more").rename(tmp_path / "more")
    (folder / "config.json").rename(tmp_path / "config.json")
    assert difference(folder, receipt) == "`config.json` was removed"
    shutil.copy2(tmp_path / "config.json", folder / "config.json")
    assert difference(folder, receipt) == "`config.json` was not checked since it was written", "another inode"
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    assert difference(folder, receipt) == "`config.json` was not checked since it was written"
    assert "cannot be listed" in str(difference(tmp_path / "none", receipt))
    for text in ("", "{}", "[]", path.read_text().replace('"version": 1', '"version": 7')):
        path.write_text(text)
        assert read_receipt(path) is None


def test_rollback(device: Device, bundles: list[Path]) -> None:
    names = pull_all(device, bundles[:2])
    tested: list[Path] = []
    result = roll_back(device.folder, tested.append)
    assert result == {"left": names[1], "current": names[0], "channel": "stable", "sequence": 2}
    assert tested == [device.folder / names[0]]
    assert device.current == digests(bundles[0]) and not os.path.lexists(device.folder / "previous")
    with pytest.raises(InputError, match="has no previous bundle"):
        roll_back(device.folder, tested.append)
    push(device.store, bundles[2], KEY, 3)
    device.pull()
    assert device.bundles == {names[0], sha256_of(bundles[2])[:16]}, "the bundle that was left is removed"
    assert os.readlink(device.folder / "previous") == names[0]


def test_rollback_over_several_bundles(device: Device, bundles: list[Path]) -> None:
    names = pull_all(device, bundles[:3], keep=2)
    for at in (1, 0):
        roll_back(device.folder, lambda folder: None)
        assert device.current == digests(bundles[at])
    push(device.store, bundles[3], KEY, 4)
    device.pull(keep=1)
    assert device.bundles == {names[0], sha256_of(bundles[3])[:16]}


def test_rollback_to_what_must_not_be_used(device: Device, bundles: list[Path]) -> None:
    names = pull_all(device, bundles[:2])

    def wrong(folder: Path) -> None:
        raise ChecksumMismatch("other logits")

    with pytest.raises(ChecksumMismatch):
        roll_back(device.folder, wrong)
    damage(device.folder / names[0] / "config.json")
    with pytest.raises(InputError, match=r"cannot be used: `config.json` was changed"):
        roll_back(device.folder, lambda folder: None)
    assert device.current == digests(bundles[1])
    assert device.pull().outcome == "unchanged", "nothing was rolled back"


def copied(device: Device) -> Device:
    """A device whose folder was restored from a copy: other inodes, and other times."""
    folder = device.folder.with_name("restored")
    shutil.copytree(device.folder, folder, symlinks=True, copy_function=shutil.copyfile)
    return replace(device, folder=folder)


def changes(device: Device) -> list[str | None]:
    return [bundle["changed"] for bundle in installed_bundles(device.folder)[1]]


def test_rollback_in_a_copied_folder(device: Device, bundles: list[Path]) -> None:
    names = pull_all(device, bundles[:2])
    restored = copied(device)
    told = changes(restored)
    assert all(words is not None and words.endswith("was not checked since it was written") for words in told)
    assert roll_back(restored.folder, lambda folder: None)["current"] == names[0]
    assert restored.current == digests(bundles[0])
    assert changes(restored)[0] is None, "its receipt is renewed"


def test_a_pull_into_a_copied_folder_fetches_nothing(device: Device, bundles: list[Path]) -> None:
    pull_all(device, bundles[:2])
    restored = copied(device)
    assert restored.pull(plan_only=True).outcome == "unchanged"
    store = CountingStore(FileStore(device.store))
    assert restored.pull(store).outcome == "unchanged" and store.bytes_read == 0
    assert changes(restored) == [None, None]


def test_damage_in_a_copied_folder_is_found(device: Device, bundles: list[Path]) -> None:
    """The file is fetched again, and others are not."""
    names = pull_all(device, bundles[:2])
    restored = copied(device)
    for name in names:
        damage(restored.folder / name / DENSE_NAME)
    with pytest.raises(InputError, match=f"cannot be used: `{DENSE_NAME}` was changed"):
        roll_back(restored.folder, lambda folder: None)
    store = CountingStore(FileStore(device.store))
    assert restored.pull(store).outcome == "installed"
    assert restored.current == digests(bundles[1])
    assert 0 < store.bytes_read <= (bundles[1] / DENSE_NAME).stat().st_size


@pytest.mark.parametrize("damaged", ["moec.json", "receipt"])
def test_a_copied_folder_without_a_manifest_to_compare_with(device: Device, bundles: list[Path], damaged: str) -> None:
    names = pull_all(device, bundles[:2])
    restored = copied(device)
    target = restored.folder / names[0]
    (target / "moec.json" if damaged == "moec.json" else target.with_name(f"{names[0]}.receipt.json")).write_text("{}")
    with pytest.raises(InputError, match="cannot be used"):
        roll_back(restored.folder, lambda folder: None)


def test_what_is_installed(device: Device, bundles: list[Path]) -> None:
    names = pull_all(device, bundles[:3], keep=2)
    (device.folder / names[0] / "config.json").touch()
    (device.folder / f"{names[1]}.receipt.json").unlink()
    state, listed = installed_bundles(device.folder)
    assert state.model == "fleet-model" and state.channel("stable").highest_sequence == 3
    sizes = [sum(path.stat().st_size for path in bundle.iterdir()) for bundle in bundles[:3]]
    for field, values in (
        ("bundle", names[::-1]),
        ("current", [True, False, False]),
        ("previous", [False, True, False]),
        ("changed", [None, NO_RECEIPT, "`config.json` was not checked since it was written"]),
        ("sequence", [3, 2, 1]),
        ("device", ["host"] * 3),
        ("bytes", sizes[::-1]),
    ):
        assert [bundle[field] for bundle in listed] == values


def test_folders_without_bundles(tmp_path: Path) -> None:
    for use in (installed_bundles, lambda folder: roll_back(folder, lambda bundle: None)):
        with pytest.raises(InputError, match="is no folder of installed bundles"):
            use(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no installed bundle"):
        installed_bundles(tmp_path / "empty")
    with pytest.raises(InputError, match="has no previous bundle"):
        roll_back(tmp_path / "empty", lambda bundle: None)
    (tmp_path / "text").write_text("")
    with pytest.raises(InputError, match="it holds `empty`"):
        installed_bundles(tmp_path)


def test_a_link_that_names_nothing(device: Device, bundles: list[Path]) -> None:
    pull_all(device, bundles[:2])
    places = Places(device.folder)
    for target in ("/etc", "..", "0" * 16, places.current):
        (device.folder / "previous").unlink()
        (device.folder / "previous").symlink_to(str(target))
        assert places.previous is None
        with pytest.raises(InputError, match="has no previous bundle"):
            roll_back(device.folder, lambda folder: None)


def test_the_state_after_changes() -> None:
    second = replace(STATE.bundles[0], manifest_sha256="cd" * 32)
    both = STATE.with_bundle(second)
    assert both.bundles == (*STATE.bundles, second)
    assert both.with_bundle(STATE.bundles[0]).bundles == (second, *STATE.bundles)
    assert both.with_first_bundle(second).bundles == (second, *STATE.bundles)
    assert both.without_bundles({"cd" * 8}).bundles == STATE.bundles
    assert STATE.channel("beta") == ChannelState("beta", 0, 0)
