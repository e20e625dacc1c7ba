"""A disk that fails or loses power at operation n.

At a power cut each file with unsynced bytes is kept, cut short, garbled, or restored to its last synced content.
Unsynced changes of names (new, renamed, removed) are lost from some point on. After a cut every operation raises.
Syncs are recorded and not executed, so hundreds of power cuts cost no time of a real disk.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

from moec.compiler.workspace.durable import Disk

Mode = Literal["full once", "full from then on", "power cut"]
MODES: tuple[Mode, ...] = ("full once", "full from then on", "power cut")


class PowerCut(BaseException):
    """A power cut. `except Exception` does not catch it."""


@dataclass(frozen=True)
class NameChange:
    """One unsynced change of names in `folder`, and the way to undo it."""

    folder: Path
    made: Path | None = None
    gone: Path | None = None
    backup: Path | None = None


class FaultyDisk(Disk):
    """A disk with a fault.

    fail_at: number of the failing operation, from 1; None: no fault.
    attic: a folder for copies.
    """

    def __init__(self, attic: Path, fail_at: int | None = None, mode: Mode = "power cut", seed: int = 0) -> None:
        self._attic, self._fail_at, self._mode = attic, fail_at, mode
        self._random = random.Random(seed)
        self._is_off = False
        self._unsynced: dict[Path, bytes] = {}
        self._changes: list[NameChange] = []
        self._names: dict[int, Path] = {}
        self.operations: list[str] = []
        attic.mkdir(exist_ok=True)

    @property
    def has_failed(self) -> bool:
        return self._fail_at is not None and len(self.operations) >= self._fail_at

    def _step(self, operation: str) -> None:
        if self._is_off:
            raise PowerCut
        self.operations.append(operation)
        if not self.has_failed:
            return
        if self._mode == "power cut":
            self.cut_power()
            raise PowerCut
        if self._mode == "full from then on" or len(self.operations) == self._fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open(self, path: Path) -> BinaryIO:
        self._step("open")
        before = path.read_bytes() if path.exists() else None
        if before is None:
            self._changes.append(NameChange(path.parent, made=path))
        file = super().open(path)
        self._unsynced[path] = before or b""
        self._names[id(file)] = path
        return file

    def append(self, path: Path, size_bytes: int) -> BinaryIO:
        self._step("append")
        if not path.exists():
            self._changes.append(NameChange(path.parent, made=path))
        file = super().append(path, size_bytes)
        self._unsynced.setdefault(path, path.read_bytes())
        self._names[id(file)] = path
        return file

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        try:
            self._step("write")
        except OSError:
            file.write(memoryview(data)[: len(data) // 2])
            file.flush()
            raise
        super().write(file, data)
        file.flush()

    def sync(self, file: BinaryIO) -> None:
        self._step("sync")
        file.flush()
        self._unsynced.pop(self._names[id(file)], None)

    def sync_file(self, path: Path) -> None:
        self._step("sync file")
        self._unsynced.pop(path, None)

    def sync_directory(self, path: Path) -> None:
        self._step("sync directory")
        self._changes = [change for change in self._changes if change.folder != path]

    def rename(self, source: Path, target: Path) -> None:
        self._step("rename")
        backup = self._copy(target) if target.exists() else None
        super().rename(source, target)
        self._unsynced = {_moved(path, source, target): old for path, old in self._unsynced.items()}
        self._changes = [
            replace(
                change,
                folder=_moved(change.folder, source, target),
                made=change.made and _moved(change.made, source, target),
                gone=change.gone and _moved(change.gone, source, target),
            )
            if change.folder == source or source in change.folder.parents
            else change
            for change in self._changes
        ]
        self._changes.append(NameChange(source.parent, made=target, gone=source, backup=backup))

    def make_directory(self, path: Path) -> None:
        self._step("make directory")
        super().make_directory(path)
        self._changes.append(NameChange(path.parent, made=path))

    def remove_tree(self, path: Path) -> None:
        if not path.exists():
            return
        self._step("remove tree")
        backup = self._copy(path)
        super().remove_tree(path)
        self._changes.append(NameChange(path.parent, gone=path, backup=backup))

    def _copy(self, path: Path) -> Path:
        copy = self._attic / str(len(list(self._attic.iterdir())))
        if path.is_dir():
            shutil.copytree(path, copy)
        else:
            shutil.copyfile(path, copy)
        return copy

    def cut_power(self) -> None:
        """Lose all content that may be lost."""
        self._is_off = True
        for path, synced in self._unsynced.items():
            if path.is_file():
                path.write_bytes(self._survivor(path.read_bytes(), synced))
        kept = self._random.randint(0, len(self._changes))
        for change in reversed(self._changes[kept:]):
            _take_back(change)

    def _survivor(self, written: bytes, synced: bytes) -> bytes:
        start = self._random.randint(0, len(written))
        fates = (written, synced, written[:start], written[:start] + self._random.randbytes(len(written) - start))
        return self._random.choice(fates)


def _moved(path: Path, source: Path, target: Path) -> Path:
    if path == source:
        return target
    return target / path.relative_to(source) if source in path.parents else path


def _take_back(change: NameChange) -> None:
    """Undo the change in the real file system."""
    if change.made is not None and change.gone is not None:
        if change.made.exists():
            os.replace(change.made, change.gone)
    elif change.made is not None:
        Disk().remove_tree(change.made)
    target = change.made if change.gone is not None and change.made is not None else change.gone
    if change.backup is not None and target is not None:
        if change.backup.is_dir():
            shutil.copytree(change.backup, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(change.backup, target)
