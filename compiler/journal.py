"""The journal of a compile: the result of every finished stage, so that a killed run goes on where it stopped.

A stage's result is one file whose name carries the key of everything it depends on; it is written durably and holds
its own digest, so a file that is there and whole is a stage that is done. Arrays travel as safetensors, never pickle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moec.manifests.codec import load_strict_json

from .durable import Disk

_DIGEST_BYTES = 32
_KEY_CHARACTERS = 16


class Journal:
    """Stage results in one folder.

    identity: digest of what all stages depend on (checkpoint, data, options, version). A journal of another identity
    is not found, so stale results are never taken up.
    """

    def __init__(self, folder: Path, identity: str, disk: Disk) -> None:
        self._folder, self._identity, self._disk = folder, identity, disk
        if not folder.is_dir():
            disk.make_directory(folder)

    def _path(self, stage: str) -> Path:
        key = hashlib.sha256(f"{self._identity}\n{stage}".encode()).hexdigest()[:_KEY_CHARACTERS]
        return self._folder / f"{stage}-{key}"

    def get(self, stage: str) -> bytes | None:
        """The stored bytes of a stage; None if it is not done or its file is damaged."""
        path = self._path(stage)
        if not path.is_file():
            return None
        raw = path.read_bytes()
        data = raw[_DIGEST_BYTES:]
        return data if hashlib.sha256(data).digest() == raw[:_DIGEST_BYTES] else None

    def put(self, stage: str, data: bytes) -> None:
        """Store the bytes of a finished stage."""
        self._disk.write_file(self._path(stage), hashlib.sha256(data).digest() + data)

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
            data = save({name: np.ascontiguousarray(array) for name, array in compute().items()})
            self.put(stage, data)
        return load(data)

    def remove(self) -> None:
        """Forget everything: the compile is complete, or starts afresh."""
        self._disk.remove_tree(self._folder)
