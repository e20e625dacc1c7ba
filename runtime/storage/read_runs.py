"""Which experts one read brings together: those that lie one behind the other in a file.

A read costs its latency once, however many experts it brings. Long runs are not worth it: storage is at its full rate,
and the first expert of a run would wait for the last. Nor does one reader take what another could read meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from moec.manifests.bundle import ExpertEntry

NONE = -1
MAX_RUN_BYTES = 1 << 20


def successors(entries: Sequence[ExpertEntry]) -> list[int]:
    """Per entry, the index of the one whose bytes begin where its own end, in the same file; NONE where there is none.

    Experts that are left out have no bytes: they neither follow nor are followed.
    """
    found = [NONE] * len(entries)
    starts = {(entry.file, entry.offset_bytes): at for at, entry in enumerate(entries) if entry.size_bytes}
    for at, entry in enumerate(entries):
        if entry.size_bytes:
            found[at] = starts.get((entry.file, entry.offset_bytes + entry.size_bytes), NONE)
    return found


def predecessors(following: Sequence[int]) -> list[int]:
    """The same relation from the other side."""
    found = [NONE] * len(following)
    for at, behind in enumerate(following):
        if behind != NONE:
            found[behind] = at
    return found


class ReadRuns:
    """Takes reads from a queue, with their neighbours that wait there too.

    sizes: bytes per expert. following: `successors`. readers: how many share what waits.
    """

    def __init__(self, sizes: Sequence[int], following: Sequence[int], readers: int = 1) -> None:
        self._sizes, self._behind, self._readers = sizes, following, readers
        self._before = predecessors(self._behind)

    def take(self, queue: deque[int]) -> list[int]:
        """The first of a queue and its neighbours that wait there too, as they lie in the file; all leave the queue."""
        most = math.ceil(len(queue) / self._readers)
        first = queue.popleft()
        run, room_bytes = deque([first]), MAX_RUN_BYTES - self._sizes[first]
        for neighbours, add in ((self._behind, run.append), (self._before, run.appendleft)):
            index = neighbours[first]
            while len(run) < most and index != NONE and self._sizes[index] <= room_bytes and index in queue:
                queue.remove(index)
                add(index)
                room_bytes -= self._sizes[index]
                index = neighbours[index]
        return list(run)
