"""The journal of a compile: the result of every finished stage, so that a killed run goes on where it stopped.

A stage's result is one file whose name carries the key of everything it depends on; it is written durably and holds
its own digest, so a file that is there and whole is a stage that is done. Arrays travel as safetensors, never pickle.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moec.manifests.codec import load_strict_json
from moec.manifests.errors import OptionError

from .durable import Disk, disk_errors

_DIGEST_BYTES = 32
_KEY_CHARACTERS = 16
_STAGE = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_ENTRY = re.compile(rf"[a-z0-9][a-z0-9._-]*-[0-9a-f]{{{_KEY_CHARACTERS}}}(\.writing)?")


class Journal:
    """Stage results in one folder.

    folder: `NAME.work` beside the output; made if absent. identity: digest of what all stages depend on (checkpoint,
    data, options, version). A journal of another identity is not found, so stale results are never taken up.
    notes: one sentence for each damaged result that was passed over.
    Raises OptionError if the folder holds anything but results of a journal; DoesNotFit, MoecError (the disk refuses).
    """

    def __init__(self, folder: Path, identity: str, disk: Disk) -> None:
        self._folder, self._identity, self._disk = folder, identity, disk
        self.notes: list[str] = []
        with disk_errors(folder):
            if not folder.is_dir():
                disk.make_directory(folder)
                disk.sync_directory(folder.parent)
            _check_folder(folder)

    @classmethod
    def fresh(cls, folder: Path, identity: str, disk: Disk) -> Journal:
        """An empty journal: what an earlier run left is removed. Raises as the class does."""
        if folder.is_dir():
            _check_folder(folder)
            with disk_errors(folder):
                disk.remove_tree(folder)
        return cls(folder, identity, disk)

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
            self.notes.append(f"`{path}` cannot be read ({error.strerror}), so its stage runs again")
            return None
        data = raw[_DIGEST_BYTES:]
        if hashlib.sha256(data).digest() == raw[:_DIGEST_BYTES]:
            return data
        self.notes.append(f"`{path}` is damaged, so its stage runs again")
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
        return load_strict_json(data)

    def arrays(self, stage: str, compute: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The stage's arrays by name, computed and stored if they are not there yet."""
        from safetensors.numpy import load, save

        data = self.get(stage)
        if data is None:
            data = save({name: np.asarray(array, order="C") for name, array in compute().items()})
            self.put(stage, data)
        arrays: dict[str, np.ndarray] = load(data)
        return arrays

    def remove(self) -> None:
        """Forget everything: the compile is complete. Raises MoecError."""
        with disk_errors(self._folder):
            self._disk.remove_tree(self._folder)


def _check_folder(folder: Path) -> None:
    """Refuse a folder that a user may have made: removing it must never cost anyone's files."""
    for path in sorted(folder.iterdir()):
        if not _ENTRY.fullmatch(path.name) or not path.is_file():
            raise OptionError(
                f"`{folder}` holds `{path.name}`, which is no stage result", "move it, or rename the output"
            )
