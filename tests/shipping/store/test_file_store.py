"""A store in a folder: whole files or none, hard links, one writer, and folders that are no store."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from moec.manifests.errors import DoesNotFit, InputError, StoreFailed
from moec.manifests.files.output_file import FileSystem
from moec.shipping.store.file_store import FileStore
from tests.failing_system import Countdown

BUNDLE, OTHER = "a" * 64, "b" * 64
CONTENT = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def source(folder: Path, data: bytes = CONTENT) -> tuple[Path, int, str]:
    """Return the arguments of `put` for a new file."""
    path = folder / hashlib.sha256(data).hexdigest()[:8]
    path.write_bytes(data)
    return path, len(data), hashlib.sha256(data).hexdigest()


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def push(store: FileStore, folder: Path) -> None:
    """Put two bundles with an equal file, and a channel."""
    for bundle in (BUNDLE, OTHER):
        store.put(f"{bundle}/weights", *source(folder))
        store.put(f"{bundle}/moec.json", *source(folder, bundle.encode()))
        store.commit(bundle)
    store.replace("channel/stable.json", b"new")
    store.close()


def test_equal_files_are_hard_links(tmp_path: Path) -> None:
    push(FileStore(tmp_path / "store", for_writing=True), tmp_path)
    first, second = (tmp_path / "store" / bundle / "weights" for bundle in (BUNDLE, OTHER))
    assert first.stat().st_ino == second.stat().st_ino
    assert second.read_bytes() == CONTENT


def test_without_links_equal_files_are_copied(tmp_path: Path) -> None:
    class Unlinked(FileSystem):
        def link(self, source: Path, target: Path) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    push(FileStore(tmp_path / "store", for_writing=True, system=Unlinked()), tmp_path)
    first, second = (tmp_path / "store" / bundle / "weights" for bundle in (BUNDLE, OTHER))
    assert first.stat().st_ino != second.stat().st_ino
    assert second.read_bytes() == CONTENT


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_no_failure_leaves_a_wrong_file(tmp_path: Path, number: int) -> None:
    """Every operation fails in turn. What the store shows is whole, and the next push completes it."""
    failed, nth = 0, 1
    while True:
        folder = tmp_path / f"{number}-{nth}"
        (folder / "store" / "channel").mkdir(parents=True)
        (folder / "store" / "channel" / "stable.json").write_bytes(b"old")
        system = FileSystem()
        countdown = Countdown(system, nth, number)
        store = FileStore(folder / "store", for_writing=True, system=system)
        try:
            push(store, folder)
        except (StoreFailed, DoesNotFit) as error:
            failed += 1
            assert isinstance(error, DoesNotFit) == (number == errno.ENOSPC)
        store.close()
        seen = FileStore(folder / "store")
        for bundle in (BUNDLE, OTHER):
            for name, content in (("weights", CONTENT), ("moec.json", bundle.encode())):
                assert seen.read_small(f"{bundle}/{name}", 1 << 20) in (None, content)
        assert seen.read_small("channel/stable.json", 100) in (b"old", b"new")
        push(FileStore(folder / "store", for_writing=True), folder)
        assert names(folder / "store") == [
            f"{BUNDLE}/moec.json",
            f"{BUNDLE}/weights",
            f"{OTHER}/moec.json",
            f"{OTHER}/weights",
            "channel/stable.json",
        ]
        if countdown.left > 0:
            break
        nth += 1
    assert failed > 20, "every operation but the link, which has a substitute, ends the push"


def test_a_failed_first_push_leaves_no_folder(tmp_path: Path) -> None:
    path, size, digest = source(tmp_path)
    path.write_bytes(CONTENT[::-1])
    with pytest.raises(InputError, match="has changed since"):
        FileStore(tmp_path / "store", for_writing=True).put(f"{BUNDLE}/weights", path, size, digest)
    assert not (tmp_path / "store").exists()


def test_a_cut_file_of_an_interrupted_push_is_replaced(tmp_path: Path) -> None:
    growing = tmp_path / "store" / f"{BUNDLE}.partial"
    growing.mkdir(parents=True)
    (growing / "weights").write_bytes(CONTENT[:-1])
    (growing / ".other.writing").write_bytes(b"cut")
    push(FileStore(tmp_path / "store", for_writing=True), tmp_path)
    assert (tmp_path / "store" / BUNDLE / "weights").read_bytes() == CONTENT
    assert not [name for name in names(tmp_path / "store") if "partial" in name or "writing" in name]


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    push(FileStore(tmp_path / "store", for_writing=True), tmp_path)
    for folder in (tmp_path / "store", tmp_path / "store" / "channel"):
        (folder / ".stable.json.01234567.writing").write_bytes(b"cut")
    (tmp_path / "store" / "own.writing").write_bytes(b"not ours")
    push(FileStore(tmp_path / "store", for_writing=True), tmp_path)
    assert [name for name in names(tmp_path / "store") if "writing" in name] == ["own.writing"]


def test_a_file_that_a_bundle_has_lost_comes_back(tmp_path: Path) -> None:
    push(FileStore(tmp_path / "store", for_writing=True), tmp_path)
    (tmp_path / "store" / BUNDLE / "weights").unlink()
    push(FileStore(tmp_path / "store", for_writing=True), tmp_path)
    assert (tmp_path / "store" / BUNDLE / "weights").read_bytes() == CONTENT
    assert not (tmp_path / "store" / f"{BUNDLE}.partial").exists()


@pytest.mark.parametrize("is_linked", [True, False])
def test_a_damaged_file_is_repaired_and_never_linked(tmp_path: Path, is_linked: bool) -> None:
    store = FileStore(tmp_path / "store", for_writing=True)
    path, size, digest = source(tmp_path)
    store.put(f"{BUNDLE}/weights", path, size, digest)
    store.commit(BUNDLE)
    store.close()
    stored = tmp_path / "store" / BUNDLE / "weights"
    stored.write_bytes(b"?" + CONTENT[1:])
    store = FileStore(tmp_path / "store", for_writing=True)
    if is_linked:  # another bundle comes first, and knows the damaged file
        store.note(f"{BUNDLE}/weights", size, digest)
        assert store.put(f"{OTHER}/weights", path, size, digest)
        store.commit(OTHER)
        assert (tmp_path / "store" / OTHER / "weights").read_bytes() == CONTENT
    assert store.put(f"{BUNDLE}/weights", path, size, digest)
    store.commit(BUNDLE)
    assert stored.read_bytes() == CONTENT
    assert not store.put(f"{BUNDLE}/weights", path, size, digest)
    store.close()


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    first = FileStore(tmp_path / "store", for_writing=True)
    first.replace("channel/stable.json", b"one")
    second = FileStore(tmp_path / "store", for_writing=True)
    with pytest.raises(StoreFailed, match="another process writes"):
        second.replace("channel/stable.json", b"two")
    first.close()
    second.replace("channel/stable.json", b"two")
    second.close()


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("mine")
    for is_writing in (True, False):
        with pytest.raises(InputError, match=r"is no store of bundles: it has `letters.txt`"):
            FileStore(tmp_path, for_writing=is_writing)
    with pytest.raises(InputError, match="is no store: Not a directory"):
        FileStore(tmp_path / "letters.txt", for_writing=True)
    with pytest.raises(InputError, match="is missing"):
        FileStore(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="it is empty"):
        FileStore(tmp_path / "empty")
    FileStore(tmp_path / "empty", for_writing=True)


@pytest.mark.gate("G10")
@pytest.mark.parametrize("name", [f"{BUNDLE}.partial", BUNDLE, "channel"])
def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path: Path, name: str) -> None:
    """What the store would remove or replace there belongs to somebody else."""
    other = tmp_path / "other"
    other.mkdir()
    for file in ("letters.txt", "weights", "stable.json", ".note.writing"):
        (other / file).write_text("dear")
    store = tmp_path / "store"
    (store / OTHER).mkdir(parents=True)
    (store / name).symlink_to(other)
    with pytest.raises(InputError, match=rf"{name}` is a link, expected a folder"):
        push(FileStore(store, for_writing=True), tmp_path)
    assert {path.name: path.read_text() for path in other.iterdir()} == dict.fromkeys(
        ("letters.txt", "weights", "stable.json", ".note.writing"), "dear"
    )


def test_a_pipe_on_the_store_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "channel").mkdir()
    os.mkfifo(tmp_path / "channel" / "stable.json")
    store = FileStore(tmp_path)
    for ask in (lambda: store.read_small("channel/stable.json", 10), lambda: store.size_bytes("channel/stable.json")):
        with pytest.raises(StoreFailed, match="is a pipe"):
            ask()
