"""A device that pulls from a store in a folder: signed bundles, and the folder that they are installed in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from moec.manifests.errors import StoreFailed
from moec.runtime.bundle.open_bundle import open_bundle, verify_bundle
from moec.shipping.channel import Channel, ChannelBundle
from moec.shipping.pull.delta import PullObserver, PullPlan
from moec.shipping.pull.fetch import FetchOptions
from moec.shipping.pull.pull import Machine, Pulled, PullRequest, pull
from moec.shipping.signatures.keys import PublicKey, encode_public_key
from moec.shipping.store.file_store import FileStore
from moec.shipping.store.interface import Store
from tests.shipping.model_bundles import NOW, digests
from tests.shipping.signing_keys import signing_key


def check_whole(folder: Path) -> None:
    """Open a bundle and read every byte."""
    with open_bundle(folder) as opened:
        verify_bundle(opened)


class Events(PullObserver):
    """Notes the events of a pull."""

    def __init__(self) -> None:
        self.plans: list[PullPlan] = []
        self.warnings: list[str] = []
        self.done: list[tuple[int, int]] = []
        self.names: list[str] = []
        self.tests = 0

    def chosen(self, channel: Channel, bundle: ChannelBundle, name: str) -> None:
        self.names.append(name)

    def planned(self, plan: PullPlan) -> None:
        self.plans.append(plan)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        self.done.append((done_bytes, total_bytes))

    def testing(self) -> None:
        self.tests += 1

    def warning(self, text: str) -> None:
        self.warnings.append(text)


@dataclass
class Device:
    """A device. folder: where it keeps bundles."""

    folder: Path
    store: Path
    keys: Sequence[PublicKey] = field(default_factory=lambda: [signing_key().public])
    now: datetime = NOW
    version: str = "0.2.0"
    events: Events = field(default_factory=Events)
    check: Callable[[Path], Any] = check_whole

    def pull(self, store: Store | None = None, **request: Any) -> Pulled:
        """Pull. store: another one than that of the folder. request: options, and the operations of the disk."""
        self.events = Events()
        options, system = request.pop("fetch", FetchOptions()), request.pop("system", None)
        asked = replace(PullRequest(self.folder, fetch=options), **request)
        machine = Machine(self.version, self.now)
        return pull(store or FileStore(self.store), self.keys, asked, self.check, machine, self.events, system)

    def write_key(self, folder: Path) -> Path:
        """Write the accepted key into a folder, and return the file."""
        folder.mkdir(exist_ok=True)
        path = folder / "fleet.pub"
        path.write_bytes(encode_public_key(self.keys[0].point))
        return path

    @property
    def current(self) -> dict[str, str]:
        """SHA-256 of the files of the current bundle, which must be whole."""
        check_whole(self.folder / "current")
        return digests(self.folder / "current")

    @property
    def names(self) -> set[str]:
        """Names in the folder."""
        return {path.name for path in self.folder.iterdir()}

    @property
    def bundles(self) -> set[str]:
        """Names of the folders of bundles, finished or not."""
        return {path.name for path in self.folder.iterdir() if path.is_dir() and not path.is_symlink()}


class CountingStore:
    """A store that counts what is read of weights, and fails after a number of bytes."""

    def __init__(self, store: FileStore, most_bytes: int = 1 << 60) -> None:
        self._store, self._most_bytes = store, most_bytes
        self.address = store.address
        self.bytes_read = 0

    def size_bytes(self, path: str) -> int | None:
        return self._store.size_bytes(path)

    def read(self, path: str, start: int, end: int) -> Iterator[memoryview]:
        for part in self._store.read(path, start, end):
            if self.bytes_read + len(part) > self._most_bytes:
                raise StoreFailed("the store fails")
            self.bytes_read += len(part)
            yield part

    def read_small(self, path: str, limit_bytes: int) -> bytes | None:
        return self._store.read_small(path, limit_bytes)

    def close(self) -> None:
        self._store.close()
