"""Expert storage in memory with its own ledger, and a cache over it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from moec.manifests.errors import StorageReadFailed
from moec.runtime.expert_cache.cache_spec import CacheSpec
from moec.runtime.expert_cache.policies import SCORES
from moec.runtime.expert_cache.python_cache import PythonCache
from moec.runtime.expert_cache.records import expert_records
from moec.runtime.options.readers import Readers
from moec.runtime.storage.read_runs import NONE
from moec.runtime.storage.read_verifier import SETTLED_NS

LAYERS, EXPERTS = 3, 4
COUNT = LAYERS * EXPERTS
InTime = Callable[[Callable[[], Any]], Any]
PATIENCE_S = 120


class FaultySource:
    """Storage in memory. It has its own ledger of loaded experts, and records errors of the cache.

    is_contiguous: whether each expert follows the one before it.

    failing: experts whose reads fail.
    gate: reads wait until it is set, but those of `ungated`.
    held: experts that must not be released.
    complaints: errors of the cache.
    """

    mode = "memory"

    def __init__(self, sizes: np.ndarray, capacity_bytes: int, is_contiguous: bool = False) -> None:
        self.sizes, self.capacity_bytes = sizes, capacity_bytes
        self.next_in_file = [*range(1, len(sizes)), NONE] if is_contiguous else [NONE] * len(sizes)
        self.loaded: set[int] = set()
        self.held: set[int] = set()
        self.ungated: set[int] = set()
        self.failing: set[int] = set()
        self.reads: list[int] = []
        self.begun = self.failures = self.releases = self.runs = 0
        self.complaints: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def block(self, index: int) -> np.ndarray:
        return np.empty(0, np.uint8)

    def load(self, *run: int) -> None:
        self.begun += 1
        if not self.ungated.issuperset(run):
            self.gate.wait(PATIENCE_S)
        if any(after != self.next_in_file[first] for first, after in pairwise(run)):
            self.complaints.append(f"{run} do not follow one another")
        if twice := self.loaded.intersection(run):
            self.complaints.append(f"{sorted(twice)} read twice")
        self.loaded.update(run)
        if sum(int(self.sizes[i]) for i in set(self.loaded)) > self.capacity_bytes:
            self.complaints.append(f"{sorted(self.loaded)} exceed {self.capacity_bytes}")
        if failed := self.failing.intersection(run):
            self.failures += len(run)
            raise StorageReadFailed(f"expert {min(failed)}")
        self.reads += run
        self.runs += len(run) > 1

    def release(self, index: int) -> None:
        self.releases += 1
        if index in self.held or index not in self.loaded:
            self.complaints.append(f"{index} released")
        self.loaded.discard(index)

    def close(self) -> None:
        pass


def make_cache(
    sizes: Sequence[int],
    capacity_bytes: int,
    policy: str = "lru",
    pins: int | None = None,
    readers: int = 1,
    is_contiguous: bool = False,
) -> tuple[FaultySource, PythonCache]:
    array = np.array(sizes, np.int64)
    source = FaultySource(array, capacity_bytes, is_contiguous)
    layers = np.minimum(np.arange(len(array)) // EXPERTS, LAYERS - 1)
    records = expert_records(layers, np.arange(len(array), dtype=np.float64), LAYERS)
    score = SCORES[policy]  # type: ignore[index]
    limit = capacity_bytes if pins is None else pins
    return source, PythonCache(source, CacheSpec(array, capacity_bytes, records, limit), score, Readers(readers))


def warmed(cache: PythonCache, indices: Sequence[int]) -> None:
    """Start warm with these experts, and wait until they are in memory."""
    cache.warm(indices)
    cache.finish_warming()


def each(stream: Iterable[list[int]]) -> list[int]:
    """Return all experts of a stream, in order."""
    return [index for some in stream for index in some]


def consume(
    source: FaultySource,
    cache: PythonCache,
    layer: int,
    indices: list[int],
    stop: int = COUNT,
    advice: Sequence[int] = (),
    all_at_once: bool = False,
) -> list[int]:
    """Stream, hold each expert while it is used, and end after at least `stop` of them."""
    found: list[int] = []
    # An expert in memory at the begin of the stream is leased until it has been used.
    waiting = set(cache.resident().tolist()) & set(indices)
    source.held = set(waiting)
    try:
        with contextlib.closing(cache.stream(layer, indices, lambda: advice, all_at_once)) as stream:
            for some in stream:
                assert some and (all_at_once or len(some) == 1)
                assert not waiting or set(some) <= waiting, "hits come first"
                for index in some:
                    assert index in source.loaded and index in cache.resident() and index in cache.leased()
                source.held = {*some, *waiting}
                cache.check_invariants()
                found += some
                waiting -= set(some)
                if len(found) >= stop:
                    break
                source.held = set(waiting)
    finally:
        source.held = set()
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


def after(condition: Callable[[], bool], action: Callable[[], object]) -> threading.Thread:
    """Start a thread that does the action as soon as the condition holds, and return it."""

    def run() -> None:
        wait_for(condition)
        action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def wait_until_settled(bundle: Path) -> None:
    """Return when the last change of any file of a folder is old enough to be told from another."""
    while time.time_ns() - max(path.stat().st_ctime_ns for path in bundle.iterdir()) <= 1.05 * SETTLED_NS:
        time.sleep(0.05)
