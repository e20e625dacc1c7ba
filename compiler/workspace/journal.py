"""The journal of a compile: the result of every finished stage, so that a killed run goes on where it stopped.

A stage's result is one file whose name carries the key of everything it depends on; it is written durably and holds
its own digest, so a file that is there and whole is a stage that is done. Arrays travel as safetensors, never pickle.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moec.manifests.errors import OptionError
from moec.manifests.files.limits import WORK_JSON
from moec.manifests.files.strict_json import load_strict_json

from .durable import Disk, StreamingFile, disk_errors

Note = Callable[[str], None]
JOURNAL_FORMAT = 2
"""What stages put into their results; raised when they put something else, so that an older journal is not read."""
_DIGEST_BYTES = 32
_PIECE_BYTES = 8 << 20
_KEY_CHARACTERS = 16
_STAGE = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_ENTRY = re.compile(rf"[a-z0-9][a-z0-9._-]*-[0-9a-f]{{{_KEY_CHARACTERS}}}(\.writing)?")


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """A checked result in the journal that is read in parts."""

    path: Path
    size_bytes: int

    def is_whole(self) -> bool:
        """Whether the digest behind the data is that of the data."""
        digest, left = hashlib.sha256(), self.size_bytes
        with self.path.open("rb") as file:
            while left and (piece := file.read(min(left, _PIECE_BYTES))):
                digest.update(piece)
                left -= len(piece)
            return left == 0 and file.read() == digest.digest()

    def read(self, offset_bytes: int, size_bytes: int) -> np.ndarray:
        """uint8 [size]. Raises ValueError outside the data, MoecError if the disk refuses."""
        if not 0 <= offset_bytes <= offset_bytes + size_bytes <= self.size_bytes:
            raise ValueError(f"bytes {offset_bytes} to {offset_bytes + size_bytes} of {self.size_bytes}")
        with disk_errors(self.path), self.path.open("rb") as file:
            file.seek(offset_bytes)
            return np.frombuffer(file.read(size_bytes), np.uint8)


class Journal:
    """Stage results in one folder.

    folder: `NAME.work` beside the output; made if absent. identity: digest of what all stages depend on (checkpoint,
    data, options, version). A journal of another identity is not found, so stale results are never taken up.
    note: told of each damaged result that is passed over.
    Raises OptionError if the folder holds anything but results of a journal; DoesNotFit, MoecError (the disk refuses).
    """

    def __init__(self, folder: Path, identity: str, disk: Disk, note: Note = lambda sentence: None) -> None:
        self._folder, self._identity, self._disk, self._note = folder, identity, disk, note
        with disk_errors(folder):
            if not folder.is_dir():
                disk.make_directory(folder)
                disk.sync_directory(folder.parent)
            _check_folder(folder)

    @classmethod
    def fresh(cls, folder: Path, identity: str, disk: Disk, note: Note = lambda sentence: None) -> Journal:
        """An empty journal: what an earlier run left is removed. Raises as the class does."""
        if folder.is_dir():
            _check_folder(folder)
            with disk_errors(folder):
                disk.remove_tree(folder)
        return cls(folder, identity, disk, note)

    def finished(self) -> list[str]:
        """The stages of this identity that have a result, in the order of their names; damaged ones among them."""
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
        """The stored bytes of a stage; None if it is not done or its file is damaged."""
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
        """Store the bytes of a finished stage; an earlier result gives way at once or not at all.

        Raises DoesNotFit, MoecError (the disk refuses).
        """
        path = self._path(stage)
        with disk_errors(path):
            self._disk.write_file(path, hashlib.sha256(data).digest() + data)

    def json(self, stage: str, compute: Callable[[], Any]) -> Any:
        """The stage's JSON value, computed and stored if it is not there yet.

        Both ways return the value as JSON gives it back, so that a resumed run sees what the first one saw.
        """
        data = self.get(stage)
        if data is None:
            data = json.dumps(compute(), allow_nan=False).encode()
            self.put(stage, data)
        return load_strict_json(data, WORK_JSON)

    def arrays(self, stage: str, compute: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The stage's arrays by name, computed and stored if they are not there yet."""
        from safetensors.numpy import load, save

        data = self.get(stage)
        if data is None:
            data = save({name: np.asarray(array, order="C") for name, array in compute().items()})
            self.put(stage, data)
        arrays: dict[str, np.ndarray] = load(data)
        return arrays

    @contextmanager
    def stream(self, stage: str) -> Iterator[StreamingFile]:
        """Write the bytes of a stage front to back, for results too large to hold; complete on a clean exit.

        Raises DoesNotFit, MoecError (the disk refuses).
        """
        path = self._path(stage)
        with disk_errors(path):
            with self._disk.create(path) as file:
                yield file
                file.write(bytes.fromhex(file.sha256))  # behind the data, unlike in `put`
            self._disk.sync_directory(path.parent)

    def read_stream(self, stage: str) -> StoredBytes | None:
        """What `stream` wrote, checked; None if it is not done or its file is damaged."""
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

    def forget(self, stage: str) -> None:
        """Remove the result of a stage that a later one has replaced. Raises MoecError."""
        path = self._path(stage)
        with disk_errors(path):
            self._disk.remove_tree(path)

    def remove(self, last: str | None = None) -> None:
        """Forget everything: the compile is complete. Raises MoecError.

        last: the stage whose result goes after all others, so that a run that is cut off here still finds it.
        """
        with disk_errors(self._folder):
            for path in sorted(self._folder.iterdir()):
                if last is not None and path != self._path(last):
                    self._disk.remove_tree(path)
            self._disk.remove_tree(self._folder)


def _check_folder(folder: Path) -> None:
    """Refuse a folder that a user may have made: removing it must never cost anyone's files."""
    for path in sorted(folder.iterdir()):
        if not _ENTRY.fullmatch(path.name) or not path.is_file():
            raise OptionError(
                f"`{folder}` holds `{path.name}`, which is no stage result", "move it, or rename the output"
            )
