"""Workers of a cluster in this process."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.cluster.ray_pool import Job, Pool
from moec.compiler.cluster.site import Site, checkpoint_identity
from moec.compiler.request.ports import OpenRuntime


class PoolHere(Pool):
    """Sites in this process that take turns. Everything between them is pickled, as between machines."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        threads: int,
        open_runtime: OpenRuntime = open_partial,
        memory_bytes: int = 0,
    ) -> None:
        self.count, self.threads = workers, threads
        self._objects: list[bytes] = []
        identity = checkpoint_identity(open_checkpoint(str(folder)))
        opened = str(folder), identity, threads, open_runtime, self._fetch, memory_bytes
        self.sites = [Site(*opened) for _ in range(workers)]
        self.jobs: list[Job] = []

    def _fetch(self, handles: Sequence[int]) -> list[Any]:
        return [pickle.loads(self._objects[handle]) for handle in handles]

    def put(self, value: Any) -> int:
        self._objects.append(pickle.dumps(value))
        return len(self._objects) - 1

    def in_order(self, jobs: Iterable[Job]) -> Iterator[Any]:
        for job in jobs:
            self.jobs.append(job)
            result = pickle.loads(pickle.dumps(job)).run(self.sites[len(self.jobs) % self.count])
            yield pickle.loads(pickle.dumps(result))

    def on_all(self, job: Job) -> None:
        for site in self.sites:
            job.run(site)
