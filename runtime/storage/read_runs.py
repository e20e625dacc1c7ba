"""Runs of experts that are adjacent in a file and are read together.

A read has its latency once, however many experts it brings. Long runs do not help: storage is at its full rate, and the
first expert of a run waits for the last. A reader also leaves work for the other readers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from moec.manifests.bundle import ExpertEntry

NONE = -1
MAX_RUN_BYTES = 1 << 20
RUNS_ON_THE_WAY = 2
"""Runs for each reader that keep it busy: one is read, and one waits."""


def next_in_file(entries: Sequence[ExpertEntry]) -> list[int]:
    """Return for each entry the index of the entry whose bytes follow in the same file; NONE without one.

    Experts that are left out have no bytes. They neither follow nor are followed.
    """
    following = [NONE] * len(entries)
    starts = {(entry.file, entry.offset_bytes): at for at, entry in enumerate(entries) if entry.size_bytes}
    for at, entry in enumerate(entries):
        if entry.size_bytes:
            following[at] = starts.get((entry.file, entry.offset_bytes + entry.size_bytes), NONE)
    return following


def previous_in_file(following: Sequence[int]) -> list[int]:
    """Return the inverse of `next_in_file`."""
    before = [NONE] * len(following)
    for at, after in enumerate(following):
        if after != NONE:
            before[after] = at
    return before


class ReadRuns:
    """Takes reads from a queue, together with adjacent experts in the queue.

    sizes: bytes of each expert.
    following: result of the function `next_in_file`.
    readers: number of readers that share the queue.
    max_run_bytes: most bytes of several experts in a run.
    """

    def __init__(
        self, sizes: Sequence[int], following: Sequence[int], readers: int = 1, max_run_bytes: int = MAX_RUN_BYTES
    ) -> None:
        self._sizes, self._after, self._readers, self._max_run_bytes = sizes, following, readers, max_run_bytes
        self._before = previous_in_file(self._after)

    def take(self, queue: deque[int]) -> list[int]:
        """Take the first expert of a queue and the queued experts adjacent to it, in file order."""
        most = math.ceil(len(queue) / self._readers)
        first = queue.popleft()
        run, room_bytes = deque([first]), self._max_run_bytes - self._sizes[first]
        for neighbours, add in ((self._after, run.append), (self._before, run.appendleft)):
            index = neighbours[first]
            while len(run) < most and index != NONE and self._sizes[index] <= room_bytes and index in queue:
                queue.remove(index)
                add(index)
                room_bytes -= self._sizes[index]
                index = neighbours[index]
        return list(run)

    def keep_busy(self, on_the_way: Iterable[int]) -> bool:
        """Return whether these experts, queued or being read, are RUNS_ON_THE_WAY runs or more for each reader."""
        most = self._max_run_bytes
        return sum(min(self._sizes[index], most) for index in on_the_way) >= RUNS_ON_THE_WAY * self._readers * most
