"""The journal of a compile: the result of each finished stage, so that a killed run can resume.

The result of a stage is one file. Its name contains the key of everything that the result depends on. The file is
written durably and contains its own digest. An intact file therefore means that its stage is done.
Arrays are stored as safetensors, never as pickle.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moec.manifests.errors import OptionError
from moec.manifests.files.limits import WORK_JSON
from moec.manifests.files.strict_json import load_strict_json

from .durable import Disk, StreamingFile, disk_errors

Note = Callable[[str], None]
JOURNAL_FORMAT = 6
"""Version of the stage results. It is raised when their content changes, so that an older journal is not read."""
SYNC_EVERY_S = 10.0
"""Seconds of records that a power failure may lose."""
_DIGEST_BYTES = 32
_PIECE_BYTES = 8 << 20
_KEY_CHARACTERS = 16
_STAGE = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_ENTRY = re.compile(rf"[a-z0-9][a-z0-9._-]*-[0-9a-f]{{{_KEY_CHARACTERS}}}(\.writing)?")


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """A verified result in the journal that is read in parts."""

    path: Path
    size_bytes: int

    def is_whole(self) -> bool:
        """Return whether the digest at the end of the file matches the data."""
        digest, left = hashlib.sha256(), self.size_bytes
        with self.path.open("rb") as file:
            while left and (piece := file.read(min(left, _PIECE_BYTES))):
                digest.update(piece)
                left -= len(piece)
            return left == 0 and file.read() == digest.digest()

    def read(self, offset_bytes: int, size_bytes: int) -> np.ndarray:
        """Return bytes of the data, uint8 [size].

        Raises ValueError outside the data.
        Raises MoecError if the disk refuses.
        """
        if not 0 <= offset_bytes <= offset_bytes + size_bytes <= self.size_bytes:
            raise ValueError(f"bytes {offset_bytes} to {offset_bytes + size_bytes} of {self.size_bytes}")
        with disk_errors(self.path), self.path.open("rb") as file:
            file.seek(offset_bytes)
            return np.frombuffer(file.read(size_bytes), np.uint8)


class Records:
    """Results of the parts of a stage by name, for a stage whose repetition would take long.

    Each record is a line with its own digest. It is appended as soon as it is known, and synced within SYNC_EVERY_S.
    The first damaged line and all lines after it are dropped.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path, self._disk, self._values = path, disk, dict[str, Any]()
        whole_bytes = 0
        with disk_errors(path):
            for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
                digest, _, data = line.partition(b" ")
                if digest != _line_digest(data):
                    break
                name, value = json.loads(data)
                self._values[name] = value
                whole_bytes += len(line)
            self._file = disk.append(path, whole_bytes)
            try:
                disk.sync_directory(path.parent)
            except BaseException:
                self._file.close()
                raise
        self._synced = time.monotonic()

    def get(self, name: str) -> Any:
        """Return the recorded JSON value, or None."""
        return self._values.get(name)

    def add(self, name: str, value: Any) -> None:
        """Record a JSON value. Raises DiskFull or MoecError."""
        data = json.dumps([name, value]).encode() + b"\n"
        self._values[name] = value
        with disk_errors(self._path):
            self._disk.write(self._file, _line_digest(data) + b" " + data)
            self._file.flush()
            if time.monotonic() - self._synced > SYNC_EVERY_S:
                self._disk.sync(self._file)
                self._synced = time.monotonic()

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *raised: object) -> None:
        with suppress(OSError):  # `add` has reported it
            self._file.close()


def _line_digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest()[:_KEY_CHARACTERS].encode()


class Journal:
    """Stage results in one folder.

    folder: `NAME.work` next to the output; created if absent.
    identity: digest of the inputs of all stages: checkpoint, data, options, version. Results of another identity are
        not found, so stale results are never used.
    note: called with a sentence about each damaged result that is skipped.
    Raises OptionError if the folder holds anything but results of a journal.
    Raises DoesNotFit or MoecError if the disk refuses.
    """

    def __init__(self, folder: Path, identity: str, disk: Disk, note: Note = lambda sentence: None) -> None:
        self._folder, self._identity, self._disk, self._note = folder, identity, disk, note
        with disk_errors(folder):
            if not folder.is_dir():
                disk.make_directory(folder)
                disk.sync_directory(folder.parent)
            _check_folder(folder)

    def of(self, identity: str) -> Journal:
        """Return the results of another identity in the same folder."""
        other = copy(self)
        other._identity = identity
        return other

    @classmethod
    def fresh(cls, folder: Path, identity: str, disk: Disk, note: Note = lambda sentence: None) -> Journal:
        """Return an empty journal. Results of an earlier run are removed. Raises the errors of the class."""
        if folder.is_dir():
            _check_folder(folder)
            with disk_errors(folder):
                disk.remove_tree(folder)
        return cls(folder, identity, disk, note)

    def finished(self) -> list[str]:
        """Return the stages of this identity that have a result, sorted by name. Damaged results are included."""
        with disk_errors(self._folder):
            names = sorted(path.name for path in self._folder.iterdir())
        stages = [(name.rpartition("-")[0], name) for name in names]
        return [stage for stage, name in stages if _STAGE.fullmatch(stage) and self._path(stage).name == name]

    def _path(self, stage: str) -> Path:
        if not _STAGE.fullmatch(stage):
            raise ValueError(f"not a stage name: `{stage[:100]}`")
        key = hashlib.sha256(f"{self._identity}\n{stage}".encode()).hexdigest()[:_KEY_CHARACTERS]
        return self._folder / f"{stage}-{key}"

    def get(self, stage: str) -> bytes | None:
        """Return the stored bytes of a stage, or None if it is not done or its file is damaged."""
        path = self._path(stage)
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._note(f"`{path}` cannot be read ({error.strerror}), so its stage runs again")
            return None
        data = raw[_DIGEST_BYTES:]
        if hashlib.sha256(data).digest() == raw[:_DIGEST_BYTES]:
            return data
        self._note(f"`{path}` is damaged, so its stage runs again")
        return None

    def put(self, stage: str, data: bytes) -> None:
        """Store the bytes of a finished stage. An earlier result is replaced atomically.

        Raises DoesNotFit or MoecError if the disk refuses.
        """
        path = self._path(stage)
        with disk_errors(path):
            self._disk.write_file(path, hashlib.sha256(data).digest() + data)

    def json(self, stage: str, compute: Callable[[], Any]) -> Any:
        """Return the JSON value of a stage. If it is not stored yet, compute and store it.

        Both cases return the value as decoded from JSON, so that a resumed run sees the same value as the first run.
        """
        data = self.get(stage)
        if data is None:
            data = json.dumps(compute(), allow_nan=False).encode()
            self.put(stage, data)
        return load_strict_json(data, WORK_JSON)

    def arrays(self, stage: str, compute: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return the arrays of a stage by name. If they are not stored yet, compute and store them."""
        from safetensors.numpy import load, save

        data = self.get(stage)
        if data is None:
            data = save({name: np.asarray(array, order="C") for name, array in compute().items()})
            self.put(stage, data)
        arrays: dict[str, np.ndarray] = load(data)
        return arrays

    @contextmanager
    def stream(self, stage: str) -> Iterator[StreamingFile]:
        """Write the bytes of a stage in sequence, for results too large to hold. A clean exit completes the result.

        Raises DoesNotFit or MoecError if the disk refuses.
        """
        path = self._path(stage)
        with disk_errors(path):
            with self._disk.create(path) as file:
                yield file
                file.write(bytes.fromhex(file.sha256))  # after the data; `put` stores the digest before the data
            self._disk.sync_directory(path.parent)

    def read_stream(self, stage: str) -> StoredBytes | None:
        """Return the verified result of `stream`, or None if it is not done or its file is damaged."""
        path = self._path(stage)
        try:
            stored = StoredBytes(path, path.stat().st_size - _DIGEST_BYTES)
            if stored.size_bytes >= 0 and stored.is_whole():
                return stored
        except FileNotFoundError:
            return None
        except OSError as error:
            self._note(f"`{path}` cannot be read ({error.strerror}), so its stage runs again")
            return None
        self._note(f"`{path}` is damaged, so its stage runs again")
        return None

    def records(self, stage: str) -> Records:
        """Open the results of the parts of a stage. Raises DoesNotFit or MoecError."""
        return Records(self._path(stage), self._disk)

    def forget(self, stage: str) -> None:
        """Remove the result of a stage that a later stage has replaced. Raises MoecError."""
        path = self._path(stage)
        with disk_errors(path):
            self._disk.remove_tree(path)

    def remove(self, last: str | None = None) -> None:
        """Remove all results, because the compile is complete. Raises MoecError.

        last: stage whose result is removed last. A run that is interrupted here still finds it.
        """
        with disk_errors(self._folder):
            for path in sorted(self._folder.iterdir()):
                if last is not None and path != self._path(last):
                    self._disk.remove_tree(path)
            self._disk.remove_tree(self._folder)


def _check_folder(folder: Path) -> None:
    """Refuse a folder that a user may have made. Removing the journal must never delete a user's files."""
    for path in sorted(folder.iterdir()):
        if not _ENTRY.fullmatch(path.name) or not path.is_file():
            raise OptionError(
                f"`{folder}` holds `{path.name}`, which is no stage result", "move it, or name another folder"
            )
