"""Every disk operation of every durable write fails once. Afterwards the content is the complete old or new one."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from moec.compiler.bundle.publish import check_replaceable, publish_directory, recover_replaced
from moec.compiler.workspace.durable import Disk, disk_errors
from moec.manifests.errors import DiskFull, DoesNotFit, MoecError, OptionError
from moec.manifests.files.output_file import require_free_bytes
from tests.compiler.workspace.faulty_disk import MODES, FaultyDisk, Mode, PowerCut

OLD, NEW = b"old " * 50, b"new content " * 40
Content = dict[str, bytes]


def content(folder: Path) -> Content:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def faults(tmp_path: Path, mode: Mode, act: Callable[[FaultyDisk, Path], None]) -> Iterator[tuple[Path, bool]]:
    """Run `act` with a fault at operation 1, 2, ... until it succeeds. Yield the folder, and whether it succeeded.

    A power cut follows a successful run: reported work must stay done.
    """
    seeds = range(12) if mode == "power cut" else range(1)
    for number in itertools.count(1):
        is_done = False
        for seed in seeds:
            folder = tmp_path / f"{number}-{seed}"
            folder.mkdir()
            disk = FaultyDisk(tmp_path / "attic", number, mode, seed)
            raised = True
            with contextlib.suppress(MoecError, OSError, PowerCut):
                act(disk, folder)
                raised = False
                disk.cut_power()
            is_done = not disk.has_failed
            yield folder, not raised
            shutil.rmtree(tmp_path / "attic")
        if is_done:
            assert number > 3, "nothing was put to the test"
            return


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("existing", [None, OLD])
def test_write_file_leaves_old_or_new(tmp_path: Path, mode: Mode, existing: bytes | None) -> None:
    def act(disk: FaultyDisk, folder: Path) -> None:
        if existing is not None:
            (folder / "file").write_bytes(existing)
        disk.write_file(folder / "file", NEW)

    for folder, is_through in faults(tmp_path, mode, act):
        found = content(folder)
        assert found.get("file") in ((NEW,) if is_through else (existing, NEW))
        if mode == "full once":
            assert set(found) <= {"file"}


def test_the_faulty_disk_does_lose_what_is_not_synced(tmp_path: Path) -> None:
    """The other tests of this file would pass on a disk that loses nothing. The faulty disk does lose content."""
    outcomes = set()
    for seed in range(40):
        (tmp_path / "file").write_bytes(OLD)
        disk = FaultyDisk(tmp_path / "attic", seed=seed)
        with disk.open(tmp_path / "new") as file:
            disk.write(file, NEW)
        disk.rename(tmp_path / "new", tmp_path / "file")
        disk.cut_power()
        found = (tmp_path / "file").read_bytes()
        outcomes.add("old" if found == OLD else "new" if found == NEW else "mixture")
        (tmp_path / "new").unlink(missing_ok=True)
    assert outcomes == {"old", "new", "mixture"}


def make_old(folder: Path) -> Content:
    final = folder / "model-moec"
    final.mkdir()
    (final / "moec.json").write_bytes(OLD)
    (final / "gone").write_bytes(OLD)
    return content(final)


def make_partial(disk: Disk, folder: Path) -> Path:
    """Make a finished folder whose files are not synced."""
    partial = folder / "model-moec.partial"
    disk.make_directory(partial)
    for name in ("dense", "moec.json"):
        with disk.open(partial / name) as file:
            disk.write(file, NEW + name.encode())
    return partial


NEW_CONTENT = {name: NEW + name.encode() for name in ("dense", "moec.json")}


@pytest.mark.gate("G5")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_old", [False, True])
def test_publish_leaves_the_old_bundle_or_the_new(tmp_path: Path, mode: Mode, has_old: bool) -> None:
    old: list[Content | None] = [None]

    def act(disk: FaultyDisk, folder: Path) -> None:
        old[0] = make_old(folder) if has_old else None
        publish_directory(disk, make_partial(disk, folder), folder / "model-moec", overwrite=has_old)

    for folder, is_through in faults(tmp_path, mode, act):
        final = folder / "model-moec"
        if mode == "full once" and has_old:
            assert content(final) in (old[0], NEW_CONTENT)
        recover_replaced(Disk(), final)
        found = content(final) if final.exists() else None
        assert found in ((NEW_CONTENT,) if is_through else (old[0], NEW_CONTENT))
        assert not (folder / "model-moec.moec-replaced").exists()


@pytest.mark.parametrize("mode", MODES)
def test_recovery_may_fail_too(tmp_path: Path, mode: Mode) -> None:
    def act(disk: FaultyDisk, folder: Path) -> None:
        make_old(folder)
        (folder / "model-moec").rename(folder / "model-moec.moec-replaced")
        recover_replaced(disk, folder / "model-moec")
        disk.write_file(folder / "other", NEW)

    for folder, _ in faults(tmp_path, mode, act):
        recover_replaced(Disk(), folder / "model-moec")
        assert content(folder / "model-moec") == {"gone": OLD, "moec.json": OLD}


def test_a_leftover_behind_a_published_bundle_is_removed(tmp_path: Path) -> None:
    make_old(tmp_path)
    (tmp_path / "model-moec.moec-replaced").mkdir()
    recover_replaced(Disk(), tmp_path / "model-moec")
    assert [path.name for path in tmp_path.iterdir()] == ["model-moec"]


def test_publish_after_an_unrecovered_crash_removes_what_lies_aside(tmp_path: Path) -> None:
    make_old(tmp_path)
    (tmp_path / "model-moec.moec-replaced").mkdir()
    publish_directory(Disk(), make_partial(Disk(), tmp_path), tmp_path / "model-moec", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model-moec"]
    assert content(tmp_path / "model-moec") == NEW_CONTENT


def test_an_existing_bundle_needs_overwrite(tmp_path: Path) -> None:
    old = make_old(tmp_path)
    with pytest.raises(OptionError, match="exists") as caught:
        publish_directory(Disk(), make_partial(Disk(), tmp_path), tmp_path / "model-moec")
    assert "--overwrite" in str(caught.value.hint)
    assert content(tmp_path / "model-moec") == old


@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling link"])
def test_only_a_bundle_is_overwritten(tmp_path: Path, kind: str) -> None:
    final, other = tmp_path / "model-moec", tmp_path / "other"
    if kind == "file":
        final.write_bytes(b"thesis")
    elif kind == "folder":
        final.mkdir()
        (final / "thesis").write_bytes(b"thesis")
    else:
        final.symlink_to(other)
        if kind == "link":
            other.mkdir()
    with pytest.raises(OptionError, match="not a bundle"):
        check_replaceable(final, overwrite=True)


def test_an_empty_or_absent_folder_may_be_replaced(tmp_path: Path) -> None:
    check_replaceable(tmp_path / "absent", overwrite=False)
    check_replaceable(tmp_path, overwrite=True)


def test_streaming_hashes_in_one_pass(tmp_path: Path) -> None:
    with Disk().create(tmp_path / "file") as file:
        file.write(OLD)
        file.write(memoryview(NEW))
        assert not (tmp_path / "file").exists()
    assert (tmp_path / "file").read_bytes() == OLD + NEW
    assert file.size_bytes == len(OLD + NEW)
    assert file.sha256 == hashlib.sha256(OLD + NEW).hexdigest()
    with pytest.raises(RuntimeError, match="not open"):
        file.write(NEW)


def test_a_writer_that_raises_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(OLD)
    with pytest.raises(KeyError), Disk().create(tmp_path / "file") as file:
        file.write(NEW)
        raise KeyError
    assert content(tmp_path) == {"file": OLD}


class RefusingDisk(Disk):
    def __init__(self, number: int) -> None:
        self._number = number

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        raise OSError(self._number, "refused")


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EACCES, MoecError), (errno.EIO, MoecError)],
)
def test_refusals_of_the_system_name_the_place(tmp_path: Path, number: int, kind: type[MoecError]) -> None:
    place = tmp_path / "file"
    with pytest.raises(kind) as caught, disk_errors(place):
        RefusingDisk(number).write_file(place, NEW)
    assert str(place) in caught.value.message
    assert caught.value.hint
    assert type(caught.value) is kind
    assert content(tmp_path) == {}


def test_free_space_is_asked_of_the_nearest_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_free_bytes(tmp_path / "not" / "yet", 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    require_free_bytes(tmp_path, 100)
    with pytest.raises(DoesNotFit, match="100 B free, 101 B are needed"):
        require_free_bytes(tmp_path, 101)


def test_removing_a_link_keeps_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    Disk().remove_tree(tmp_path / "link")
    Disk().remove_tree(tmp_path / "absent")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
