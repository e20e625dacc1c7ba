"""Pushes to a store in a folder: what a channel says, what is sent, what is refused, what an interruption leaves."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from moec.manifests.bundle import DENSE_NAME, FORMAT_VERSIONS, MANIFEST_NAME, experts_file_name
from moec.manifests.codec import decode_manifest
from moec.manifests.errors import (
    BundleIncomplete,
    ChecksumMismatch,
    InputError,
    OptionError,
    SignatureInvalid,
    StoreFailed,
)
from moec.manifests.progress import Progress
from moec.profiles.loading import load_profile
from moec.runtime.memory.budget import nominal_memory
from moec.shipping.channel import Channel, channel_path, decode_moment, encode_moment, signature_path, verify_channel
from moec.shipping.push_bundles import LEAST_MOEC, ChannelRequest, SentBundle, push_bundles
from moec.shipping.signatures.keys import PrivateKey, PublicKey, make_key_pair, read_public_key
from moec.shipping.signatures.model_signature import sign_bundle, signature_file, verify_signature
from moec.shipping.store.file_store import FileStore
from moec.shipping.store.interface import Sent, Store
from tests.runtime.tiny_bundle import write_bundle as write_tiny_bundle
from tests.shipping.devices import Device
from tests.shipping.model_bundles import NOW, Shape, digests, sha256_of, write_bundle
from tests.shipping.signing_keys import signing_key

KEY, OTHER = signing_key(), signing_key("other")
KILLS = 100 if os.environ.get("MOEC_FULL_GATES") else 3
SHAPE = Shape(layers=6, experts=8, hidden=256, width=512, vocabulary=1024)
BOARD, PHONE = load_profile("raspberry-pi-5-nvme"), load_profile("xiaomi-17")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions for a board; one layer differs."""
    root = tmp_path_factory.mktemp("boards")
    return [
        write_bundle(root / f"v{at}", version=lambda layer, expert, at=at: at * layer, profile=BOARD) for at in range(2)
    ]


@pytest.fixture(scope="module")
def phone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle for another device, whose expert files are those of the board."""
    return write_bundle(tmp_path_factory.mktemp("phones") / "v0", profile=PHONE, note="phone")


class WatchedStore(FileStore):
    """Fails at the nth operation that changes something.

    puts: paths whose bytes were sent.
    after_channel: called when the channel was read.
    """

    def __init__(self, folder: Path, fails_at: int = 0) -> None:
        super().__init__(folder, for_writing=True)
        self.left = fails_at
        self.puts: list[str] = []
        self.after_channel: Callable[[], object] = lambda: None

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise StoreFailed("the store has gone", "try again later")

    def put(
        self, path: str, source: Path, size_bytes: int, sha256: str, sent: Sent | None = None, again: bool = False
    ) -> bool:
        self._count()
        is_new = super().put(path, source, size_bytes, sha256, sent, again)
        self.puts += [path] if is_new else []
        return is_new

    def commit(self, folder: str) -> None:
        self._count()
        super().commit(folder)

    def replace(self, path: str, data: bytes) -> None:
        self._count()
        super().replace(path, data)

    def read_small(self, path: str, limit_bytes: int) -> bytes | None:
        found = super().read_small(path, limit_bytes)
        if path == channel_path("stable"):
            self.after_channel()
        return found


def push(
    store: Path | Store,
    *bundles: Path,
    key: PrivateKey = KEY,
    accepted: Sequence[PublicKey] = (),
    verifying: Progress | None = None,
    sending: Progress | None = None,
    **request: object,
) -> tuple[Channel, list[SentBundle]]:
    opened = FileStore(store, for_writing=True) if isinstance(store, Path) else store
    try:
        asked = replace(ChannelRequest(), **request)  # type: ignore[arg-type]
        return push_bundles(bundles, opened, key, asked, NOW, accepted, verifying=verifying, sending=sending)
    finally:
        opened.close()


def channel_on(store: Path, name: str = "stable") -> Channel:
    data = (store / channel_path(name)).read_bytes()
    return verify_channel(data, [KEY.public, OTHER.public], name)


def test_a_push_for_two_devices_is_pulled_by_both(tmp_path: Path, boards: list[Path], phone: Path) -> None:
    pushed = push(tmp_path / "store", boards[0], phone)
    assert pushed[0] == channel_on(tmp_path / "store")
    for profile, bundle in ((BOARD, boards[0]), (PHONE, phone)):
        device = Device(tmp_path / profile.name, tmp_path / "store")
        device.pull(device=profile.name, memory_bytes=1 << 40)
        assert device.current == digests(bundle)


def test_what_a_channel_says(tmp_path: Path, boards: list[Path], phone: Path) -> None:
    push(tmp_path / "store", phone, boards[0], lasting=timedelta(days=3))
    channel = channel_on(tmp_path / "store")
    assert (channel.model, channel.channel, channel.sequence) == ("fleet-model", "stable", 1)
    assert (channel.created, channel.expires) == (encode_moment(NOW), encode_moment(NOW + timedelta(days=3)))
    assert channel.minimum_moec == LEAST_MOEC[1]
    assert [bundle.device for bundle in channel.bundles] == sorted([BOARD.name, PHONE.name])
    entry = channel.bundles[0]
    data = (boards[0] / MANIFEST_NAME).read_bytes()
    manifest = decode_manifest(data, "moec.json")
    assert entry.manifest_sha256 == sha256_of(boards[0]) and entry.manifest_bytes == len(data)
    assert entry.device_json == (boards[0] / "device.json").read_text()
    assert entry.total_bytes == sum(path.stat().st_size for path in boards[0].iterdir())
    assert entry.memory_floor_bytes == nominal_memory(manifest).floor_bytes
    signature = (tmp_path / "store" / signature_path(entry.manifest_sha256)).read_bytes()
    assert verify_signature(signature, data, manifest, [KEY.public], "sig") == KEY.public


def test_equal_files_are_stored_and_sent_once(tmp_path: Path, boards: list[Path], phone: Path) -> None:
    store = tmp_path / "store"
    first = push(store, boards[0], phone)
    expert = experts_file_name(0)
    assert os.path.samefile(store / sha256_of(boards[0]) / expert, store / sha256_of(phone) / expert)
    changed = {name for name, digest in digests(phone).items() if digests(boards[0]).get(name) != digest}
    assert first[1][1].sent_files == len(changed) < len(digests(phone))
    second = push(store, boards[1])
    changed = {name for name, digest in digests(boards[1]).items() if digests(boards[0])[name] != digest}
    assert changed == {experts_file_name(1), MANIFEST_NAME}
    assert second[1][0].sent_bytes == sum((boards[1] / name).stat().st_size for name in changed)
    assert os.path.samefile(store / sha256_of(boards[1]) / DENSE_NAME, store / sha256_of(boards[0]) / DENSE_NAME)


def test_a_later_push_raises_the_sequence(tmp_path: Path, boards: list[Path]) -> None:
    store = tmp_path / "store"
    for sequence in (1, 2, 3):
        pushed = push(store, boards[0])
        assert pushed[0].sequence == channel_on(store).sequence == sequence
        assert pushed[1][0].sent_files == (len(digests(boards[0])) if sequence == 1 else 0)
    assert push(store, boards[0], sequence=10)[0].sequence == 10
    with pytest.raises(OptionError, match="`--sequence 10` is not higher than 10"):
        push(store, boards[0], sequence=10)


def test_other_devices_stay_in_the_channel(tmp_path: Path, boards: list[Path], phone: Path) -> None:
    store = tmp_path / "store"
    push(store, boards[0], phone)
    push(store, boards[1])
    digest = {bundle.device: bundle.manifest_sha256 for bundle in channel_on(store).bundles}
    assert digest == {BOARD.name: sha256_of(boards[1]), PHONE.name: sha256_of(phone)}
    push(store, boards[1], only=True)
    assert [bundle.device for bundle in channel_on(store).bundles] == [BOARD.name]


def test_channels_are_apart(tmp_path: Path, boards: list[Path]) -> None:
    """A new channel finds the files that the default one has."""
    store = tmp_path / "store"
    push(store, boards[0])
    pushed = push(store, boards[1], name="beta")
    assert pushed[0].sequence == 1 and pushed[1][0].sent_files == 2
    assert channel_on(store).bundles[0].manifest_sha256 == sha256_of(boards[0])
    assert channel_on(store, "beta").bundles[0].manifest_sha256 == sha256_of(boards[1])


def test_the_version_that_devices_need(tmp_path: Path, boards: list[Path], phone: Path) -> None:
    assert set(LEAST_MOEC) == set(FORMAT_VERSIONS), "a new format needs an entry"
    store = tmp_path / "store"
    assert push(store, boards[0], minimum_moec="0.10")[0].minimum_moec == "0.10"
    assert push(store, phone)[0].minimum_moec == "0.10", "the bundle that stays needs it"
    assert push(store, phone, boards[0])[0].minimum_moec == LEAST_MOEC[1]


def test_a_signature_next_to_the_folder_is_pushed(tmp_path: Path) -> None:
    folder = tmp_path / "signed"
    write_bundle(folder, profile=BOARD)
    data = (folder / MANIFEST_NAME).read_bytes()
    manifest = decode_manifest(data, "moec.json")
    signature_file(folder).write_bytes(sign_bundle(data, manifest, OTHER))
    with pytest.raises(SignatureInvalid, match="none of the accepted keys") as caught:
        push(tmp_path / "store", folder)
    assert caught.value.hint == f"sign the bundle again: moec sign {folder}"
    assert not (tmp_path / "store").exists()
    push(tmp_path / "store", folder, accepted=[OTHER.public])
    stored = tmp_path / "store" / signature_path(sha256_of(folder))
    assert stored.read_bytes() == signature_file(folder).read_bytes()
    signature_file(folder).unlink()
    push(tmp_path / "store", folder)
    assert verify_signature(stored.read_bytes(), data, manifest, [KEY.public], "sig") == KEY.public
    before = stored.stat().st_mtime_ns, stored.read_bytes()
    push(tmp_path / "store", folder)
    assert (stored.stat().st_mtime_ns, stored.read_bytes()) == before


def test_a_channel_of_another_key(tmp_path: Path, boards: list[Path]) -> None:
    store = tmp_path / "store"
    push(store, boards[0], key=OTHER)
    before = (store / channel_path("stable")).read_bytes()
    with pytest.raises(SignatureInvalid) as caught:
        push(store, boards[1])
    assert caught.value.hint == "name the key that it was signed with: --accept-key FILE.pub"
    assert (store / channel_path("stable")).read_bytes() == before
    assert not (store / sha256_of(boards[1])).exists()
    assert push(store, boards[1], accepted=[OTHER.public])[0].sequence == 2


def test_wrong_bundles_are_refused_before_anything_is_sent(tmp_path: Path, boards: list[Path], phone: Path) -> None:
    store = tmp_path / "store"
    other_model = write_bundle(tmp_path / "other", name="other-model")
    unfinished = write_tiny_bundle(tmp_path / "unfinished", certified=False)
    partial = write_bundle(tmp_path / "bundle.partial")
    damaged = write_bundle(tmp_path / "damaged", profile=BOARD)
    data = bytearray((damaged / DENSE_NAME).read_bytes())
    data[-1] ^= 1
    (damaged / DENSE_NAME).write_bytes(data)
    for bundles, kind, told in (
        ((boards[0], boards[1]), InputError, f"are both for the device `{BOARD.name}`"),
        ((phone, other_model), InputError, "is a bundle of `other-model`"),
        ((unfinished,), BundleIncomplete, "is not certified"),
        ((partial,), BundleIncomplete, "unfinished"),
        ((phone, damaged), ChecksumMismatch, "differs from its digest"),
        ((tmp_path,), BundleIncomplete, "has no `moec.json`"),
    ):
        with pytest.raises(kind, match=told):
            push(store, *bundles)
        assert not store.exists()


def test_a_store_of_another_model(tmp_path: Path, boards: list[Path]) -> None:
    store = tmp_path / "store"
    push(store, write_bundle(tmp_path / "other", name="other-model"))
    for name in ("stable", "beta"):
        with pytest.raises(InputError, match="has bundles of `other-model`, these are of `fleet-model`"):
            push(store, boards[0], name=name)
    assert not (store / sha256_of(boards[0])).exists()


def test_a_wrong_name_and_too_long_a_time(tmp_path: Path, boards: list[Path]) -> None:
    with pytest.raises(InputError, match="is no name of a channel"):
        push(tmp_path / "store", boards[0], name="../stable")
    with pytest.raises(OptionError, match="there is no such channel"):
        push(tmp_path / "store", boards[0], lasting=timedelta(days=10**7))
    assert not (tmp_path / "store").exists()


def test_an_interrupted_push_changes_no_channel_and_goes_on(tmp_path: Path, boards: list[Path], phone: Path) -> None:
    """The store fails at each operation in turn. After each failure the old bundle can be pulled, whole."""
    store = tmp_path / "store"
    push(store, boards[0])
    sent, failures = list[str](), 0
    while True:
        watched = WatchedStore(store, fails_at=failures + 1)
        try:
            push(watched, boards[1], phone)
        except StoreFailed:
            failures += 1
            sent += watched.puts
            assert channel_on(store).sequence == 1
            device = Device(tmp_path / f"device{failures}", store)
            device.pull(device=BOARD.name, memory_bytes=1 << 40)
            assert device.current == digests(boards[0])
            continue
        break
    sent += watched.puts
    # Two commits, a signature and the channel. The other signature is there by then.
    assert failures == len(digests(boards[1])) + len(digests(phone)) + 4
    assert len(sent) == len(set(sent)), "a file is sent again"
    assert channel_on(store).sequence == 2


def test_two_pushes_at_once(tmp_path: Path, boards: list[Path]) -> None:
    """The channel that another push has written meanwhile is not lost."""
    store = tmp_path / "store"
    push(store, boards[0])
    watched = WatchedStore(store)
    path = store / channel_path("stable")

    def write_another() -> None:
        path.write_bytes(b"another")
        watched.after_channel = lambda: None

    watched.after_channel = write_another
    with pytest.raises(StoreFailed, match="has changed during the push"):
        push(watched, boards[1])
    assert path.read_bytes() == b"another"


def test_progress_goes_up_to_the_end(tmp_path: Path, boards: list[Path], phone: Path) -> None:
    verified, sent = list[tuple[int, int]](), list[tuple[int, int]]()
    total = sum(path.stat().st_size for bundle in (boards[0], phone) for path in bundle.iterdir())
    for _ in range(2):
        push(
            tmp_path / "store",
            boards[0],
            phone,
            verifying=lambda done, total: verified.append((done, total)),
            sending=lambda done, total: sent.append((done, total)),
        )
        assert sent == sorted(sent) and sent[-1] == (total, total)
        assert verified == sorted(verified) and verified[-1][0] <= verified[-1][1] == total
        verified.clear()
        sent.clear()


def test_a_damaged_manifest_on_the_store_is_no_source(tmp_path: Path, boards: list[Path]) -> None:
    """What its files hold is then unknown, so they are sent."""
    store = tmp_path / "store"
    push(store, boards[0])
    (store / sha256_of(boards[0]) / MANIFEST_NAME).write_bytes(b"{}")
    assert push(store, boards[1])[1][0].sent_files == len(digests(boards[1]))


def test_moments_are_in_order(tmp_path: Path, boards: list[Path]) -> None:
    channel = push(tmp_path / "store", boards[0])[0]
    assert decode_moment(channel.expires) - decode_moment(channel.created) == timedelta(days=90)


@pytest.mark.gate("G13")
def test_a_killed_push_leaves_a_usable_store(tmp_path: Path) -> None:
    """The push is killed at any moment. Devices can use the store, and the next push completes it."""

    def start(bundle: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "moec.cli.main", "push", bundle, store, "--key", tmp_path / "fleet.pem"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    bundles = [write_bundle(tmp_path / f"v{at}", SHAPE, lambda layer, expert, at=at: at) for at in range(2)]
    make_key_pair(tmp_path / "fleet.pem")
    key, store = read_public_key(tmp_path / "fleet.pub"), tmp_path / "store"
    started = time.monotonic()
    assert start(bundles[0]).wait() == 0
    usual_s = time.monotonic() - started
    draw, killed = random.Random(KILLS), 0
    for kill in range(KILLS):
        process = start(bundles[1])
        time.sleep(draw.uniform(0.3, 1.0) * usual_s)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        channel = verify_channel((store / channel_path("stable")).read_bytes(), [key], "stable")
        device = Device(tmp_path / f"device{kill}", store, [key])
        device.pull()
        assert device.current == digests(bundles[0 if channel.sequence == 1 else 1])
    assert start(bundles[1]).wait() == 0
    device = Device(tmp_path / "device", store, [key])
    device.pull()
    assert device.current == digests(bundles[1])
    assert not [path for path in store.rglob("*") if path.suffix in (".partial", ".writing")]
    assert killed or KILLS < 10
