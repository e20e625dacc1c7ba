"""What every kind of store does, on a folder, HTTP servers, moto (S3), a fake hub and docker-registry."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from moec.manifests.errors import InputError, StoreFailed
from moec.shipping.push_bundles import ChannelRequest, push_bundles
from moec.shipping.store.interface import PART_BYTES, Store
from tests.shipping.devices import Device
from tests.shipping.model_bundles import NOW, digests, write_bundle
from tests.shipping.signing_keys import signing_key
from tests.shipping.store.conftest import Place

BUNDLE, OTHER = "a" * 64, "b" * 64
WEIGHTS = hashlib.shake_256(b"weights").digest(2 * PART_BYTES + 4321)
MANIFEST = b'{"name": "tiny"}\n'
NAME, MANIFEST_NAME = "experts-00000.safetensors", "moec.json"
SEES_AT_ONCE = ("http", "nginx", "s3")
"""Kinds without transactions: a file is there when its upload has ended."""


def write(folder: Path, data: bytes) -> tuple[Path, int, str]:
    """Return the arguments of `put` for a new file with this content."""
    digest = hashlib.sha256(data).hexdigest()
    path = folder / digest[:12]
    path.write_bytes(data)
    return path, len(data), digest


def push(store: Store, folder: Path, bundle: str = BUNDLE, again: bool = False) -> list[bool]:
    """Put a bundle of two files. Returns what each `put` returned."""
    new = [store.put(f"{bundle}/{NAME}", *write(folder, WEIGHTS), again=again)]
    new.append(store.put(f"{bundle}/{MANIFEST_NAME}", *write(folder, MANIFEST), again=again))
    store.commit(bundle)
    return new


def read(store: Store, path: str, start: int, end: int) -> bytes:
    parts = [bytes(part) for part in store.read(path, start, end)]
    assert all(0 < len(part) <= PART_BYTES for part in parts)
    return b"".join(parts)


def test_what_was_put_is_read(place: Place, tmp_path: Path) -> None:
    with_progress: list[int] = []
    store = place.open()
    assert store.put(f"{BUNDLE}/{NAME}", *write(tmp_path, WEIGHTS), with_progress.append)
    assert sum(with_progress) == len(WEIGHTS)
    store.put(f"{BUNDLE}/{MANIFEST_NAME}", *write(tmp_path, MANIFEST))
    store.commit(BUNDLE)
    store.close()
    store = place.open(for_writing=False)
    path = f"{BUNDLE}/{NAME}"
    assert store.size_bytes(path) == len(WEIGHTS)
    spans = [(0, len(WEIGHTS)), (0, 1), (7, 7), (PART_BYTES - 3, PART_BYTES + 3), (len(WEIGHTS) - 1, len(WEIGHTS))]
    for start, end in spans:
        assert read(store, path, start, end) == WEIGHTS[start:end]
    assert store.read_small(f"{BUNDLE}/{MANIFEST_NAME}", len(MANIFEST)) == MANIFEST
    store.close()


def test_what_is_not_there(place: Place, tmp_path: Path) -> None:
    store = place.open()
    push(store, tmp_path)
    for path in (f"{BUNDLE}/none", f"{OTHER}/{NAME}", "channel/stable.json", f"{OTHER}.sig"):
        assert store.size_bytes(path) is None
        assert store.read_small(path, 100) is None
        with pytest.raises(StoreFailed):
            read(store, path, 0, 10)
    store.close()


def test_bounds_are_kept(place: Place, tmp_path: Path) -> None:
    store = place.open()
    push(store, tmp_path)
    with pytest.raises(StoreFailed):
        store.read_small(f"{BUNDLE}/{NAME}", len(WEIGHTS) - 1)
    for start, end in ((0, len(WEIGHTS) + 1), (len(WEIGHTS), len(WEIGHTS) + 5), (len(WEIGHTS) + 9, len(WEIGHTS) + 10)):
        with pytest.raises(StoreFailed):
            read(store, f"{BUNDLE}/{NAME}", start, end)
    store.close()


def test_nothing_is_put_twice(place: Place, tmp_path: Path) -> None:
    store = place.open()
    assert push(store, tmp_path) == [True, True]
    assert push(store, tmp_path) == [False, False]
    store.close()
    store = place.open()
    assert push(store, tmp_path) == [False, False]
    store.close()


def test_everything_is_put_again_on_request(place: Place, tmp_path: Path) -> None:
    store = place.open()
    push(store, tmp_path)
    store.close()
    store = place.open()
    assert push(store, tmp_path, again=True) == [True, True]
    assert read(store, f"{BUNDLE}/{NAME}", 0, len(WEIGHTS)) == WEIGHTS
    store.close()


def test_an_interrupted_push_goes_on(place: Place, tmp_path: Path) -> None:
    store = place.open()
    store.put(f"{BUNDLE}/{NAME}", *write(tmp_path, WEIGHTS))
    store.close()
    store = place.open()
    assert (store.size_bytes(f"{BUNDLE}/{NAME}") is not None) == (place.kind in SEES_AT_ONCE)
    assert push(store, tmp_path) == [place.kind == "hub", True], "the hub does not tell that it has the content"
    assert read(store, f"{BUNDLE}/{NAME}", 0, len(WEIGHTS)) == WEIGHTS
    store.close()


def test_an_equal_file_is_not_sent(place: Place, tmp_path: Path) -> None:
    """Neither within one push, nor in a later one that learns what is there."""
    store = place.open()
    push(store, tmp_path)
    store.close()
    store = place.open()
    store.note(f"{BUNDLE}/{NAME}", len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest())
    sent: list[int] = []
    source, size, digest = write(tmp_path, WEIGHTS)
    for bundle in (OTHER, "c" * 64):
        assert store.put(f"{bundle}/{NAME}", source, size, digest, sent.append) == (place.kind == "hub")
        store.put(f"{bundle}/{MANIFEST_NAME}", *write(tmp_path, bundle.encode()))
        store.commit(bundle)
        assert read(store, f"{bundle}/{NAME}", 0, size) == WEIGHTS
    assert place.kind == "hub" or sent == []
    store.close()


def test_a_small_file_is_replaced(place: Place, tmp_path: Path) -> None:
    store = place.open()
    push(store, tmp_path)
    for number, data in enumerate((b"first", b"the second one", b"3")):
        store.replace("channel/stable.json", data)
        assert store.read_small("channel/stable.json", 100) == data
        assert store.size_bytes("channel/stable.json") == len(data), number
    store.replace(f"{BUNDLE}.sig", b"signature")
    store.replace("channel/beta.json", b"another")
    store.close()
    store = place.open(for_writing=False)
    assert store.read_small("channel/stable.json", 1) == b"3"
    assert store.read_small(f"{BUNDLE}.sig", 100) == b"signature"
    assert read(store, f"{BUNDLE}.sig", 2, 5) == b"gna"
    store.close()


def test_a_source_that_changes_is_not_stored(place: Place, tmp_path: Path) -> None:
    store = place.open()
    path, size, digest = write(tmp_path, WEIGHTS)
    path.write_bytes(WEIGHTS[:-1] + b"?")
    for wrong in ((path, size, digest), (path, size - 1, digest), (tmp_path / "none", size, digest)):
        with pytest.raises(InputError):
            store.put(f"{BUNDLE}/{NAME}", *wrong)
    store.put(f"{BUNDLE}/{MANIFEST_NAME}", *write(tmp_path, MANIFEST))
    store.commit(BUNDLE)
    assert store.size_bytes(f"{BUNDLE}/{NAME}") is None
    store.close()


def test_an_empty_file(place: Place, tmp_path: Path) -> None:
    store = place.open()
    store.put(f"{BUNDLE}/empty", *write(tmp_path, b""))
    store.put(f"{BUNDLE}/{MANIFEST_NAME}", *write(tmp_path, MANIFEST))
    store.commit(BUNDLE)
    assert store.size_bytes(f"{BUNDLE}/empty") == 0
    assert store.read_small(f"{BUNDLE}/empty", 0) == b""
    store.close()


def test_several_threads_read(place: Place, tmp_path: Path) -> None:
    store = place.open()
    push(store, tmp_path)
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for start in range(number * 1000, len(WEIGHTS) - 200_000, 90_000):
                if read(store, f"{BUNDLE}/{NAME}", start, start + 200_000) != WEIGHTS[start : start + 200_000]:
                    wrong.append(start)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    store.close()


def test_what_is_pushed_is_pulled(place: Place, tmp_path: Path) -> None:
    """Two versions of a bundle, one after the other."""
    bundles = [write_bundle(tmp_path / f"v{at}", version=lambda layer, expert, at=at: at * layer) for at in range(2)]
    device = Device(tmp_path / "device", tmp_path)
    for sequence, bundle in enumerate(bundles, 1):
        store = place.open()
        channel, sent = push_bundles([bundle], store, signing_key(), ChannelRequest(), NOW)
        store.close()
        assert channel.sequence == sequence
        store = place.open(for_writing=False)
        device.pull(store)
        store.close()
        assert device.current == digests(bundle)
    (plan,) = device.events.plans
    assert 0 < plan.fetched_bytes < plan.total_bytes / 2, "a delta"
    if place.kind != "hub":
        assert sent[0].sent_files == 2, "the changed file and the manifest"
