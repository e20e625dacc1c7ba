"""Replay a recorded expert trace under any policy and capacity, and under the offline optimum, without reading a byte.

The replay makes the decisions of ExpertCache with prefetch off, so its counts are those of a real run. The offline
optimum evicts what is needed again last. That is the farthest-next-use rule: no policy misses less as long as experts
have equal sizes and one access fits into the capacity; with unequal sizes it is a strong yardstick, not a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from moec.manifests.errors import MemoryBudgetExceeded

from .eviction import SCORES, ExpertRecords, PolicyScore, eviction_order

OPTIMUM = "optimum"
POPULARITY = "popularity"
NEVER = np.iinfo(np.int64).max

Access = tuple[int, tuple[int, ...]]
"""One layer of one pass: the layer, and the experts it asked for."""


def popularity_score(records: ExpertRecords, running_layer: int) -> np.ndarray:
    """Least often seen in calibration goes first, wherever its layer is."""
    return records.frequency


@dataclass(frozen=True, slots=True)
class SimulatedCounts:
    """What a cache of this policy and capacity would have done. bytes_read leaves the warm start out, as the run's."""

    policy: str
    capacity_bytes: int
    lookups: int
    hits: int
    misses: int
    rereads: int
    evictions: int
    bytes_read: int

    def to_plain(self) -> dict[str, int | str]:
        """For `--json`."""
        return asdict(self)


def global_indices(trace: Sequence[Access], first_expert: Sequence[int]) -> list[Access]:
    """Experts counted within their layer -> experts counted over all layers. first_expert: [L] offsets."""
    return [(layer, tuple(first_expert[layer] + expert for expert in experts)) for layer, experts in trace]


def replay(
    trace: Sequence[Access],
    sizes: np.ndarray,
    capacity_bytes: int,
    records: ExpertRecords,
    policy: str,
    warm: Sequence[int] = (),
) -> SimulatedCounts:
    """Run a trace of global indices through a cache that starts with `warm`, as far as it fits, first index first.

    sizes: bytes per expert, int64 [N]. records: layers and calibration frequencies; its counts are not touched.
    policy: `edgemoe`, `lru`, `lfu`, `popularity` or `optimum`.
    Raises MemoryBudgetExceeded if one expert does not fit, KeyError on another policy.
    """
    scores = {**dict[str, PolicyScore](SCORES.items()), POPULARITY: popularity_score}
    chosen = None if policy == OPTIMUM else scores[policy]
    accesses, first_use = _with_next_use(trace, len(sizes))
    cache = _SimulatedCache(sizes, capacity_bytes, records, chosen, first_use)
    cache.fill(warm)
    for layer, experts, next_use in accesses:
        cache.access(layer, experts, next_use)
    return SimulatedCounts(
        policy=policy,
        capacity_bytes=capacity_bytes,
        lookups=cache.lookups,
        hits=cache.lookups - cache.misses,
        misses=cache.misses,
        rereads=cache.rereads,
        evictions=cache.evictions,
        bytes_read=cache.bytes_read,
    )


def _with_next_use(
    trace: Sequence[Access], count: int
) -> tuple[list[tuple[int, tuple[int, ...], np.ndarray]], np.ndarray]:
    """Each access with the position of the next access of its experts, and of every expert's first, [count].

    Positions are int64; NEVER where there is none.
    """
    upcoming = np.full(count, NEVER, np.int64)
    rows: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    for position in range(len(trace) - 1, -1, -1):
        layer, experts = trace[position]
        rows.append((layer, experts, upcoming[list(experts)]))
        upcoming[list(experts)] = position
    rows.reverse()
    return rows, upcoming


class _SimulatedCache:
    """ExpertCache without bytes, threads and advice. chosen None: evict what is needed again last."""

    def __init__(
        self,
        sizes: np.ndarray,
        capacity_bytes: int,
        records: ExpertRecords,
        chosen: PolicyScore | None,
        first_use: np.ndarray,
    ) -> None:
        count = len(sizes)
        self._sizes, self._capacity_bytes, self._chosen = sizes, capacity_bytes, chosen
        self._records = records.unused()
        self._next_use = first_use
        self._is_resident = np.zeros(count, bool)
        self._is_leased = np.zeros(count, bool)
        self._seen = np.zeros(count, bool)
        self._used_bytes = self._clock = 0
        self.lookups = self.misses = self.rereads = self.evictions = self.bytes_read = 0

    def fill(self, indices: Sequence[int]) -> None:
        """The warm start: what fits, in order; evicts nothing and counts as seen."""
        for index in indices:
            if not self._is_resident[index] and self._used_bytes + self._sizes[index] <= self._capacity_bytes:
                self._is_resident[index] = self._seen[index] = True
                self._used_bytes += int(self._sizes[index])

    def access(self, layer: int, experts: Sequence[int], next_use: np.ndarray) -> None:
        """One layer of one pass: hits are computed first, misses are read in order as room appears."""
        asked = list(experts)
        self._clock += 1
        self._records.use(asked, self._clock)
        self._next_use[asked] = next_use
        hits = [index for index in asked if self._is_resident[index]]
        misses = [index for index in asked if not self._is_resident[index]]
        self.lookups += len(asked)
        self.misses += len(misses)
        self._is_leased[hits] = True
        self._issue(layer, misses)
        self._is_leased[hits] = False
        while misses:
            self._issue(layer, misses)
            index = misses.pop(0)
            if not self._is_leased[index]:
                raise MemoryBudgetExceeded(
                    f"an expert of {int(self._sizes[index])} bytes does not fit into {self._capacity_bytes}",
                    "simulate a larger cache",
                )
            self._is_leased[index] = False

    def _issue(self, layer: int, waiting: Sequence[int]) -> None:
        for index in waiting:
            if self._is_leased[index]:
                continue
            if not self._make_room(layer, int(self._sizes[index])):
                return
            self._is_resident[index] = self._is_leased[index] = True
            self._used_bytes += int(self._sizes[index])
            self.bytes_read += int(self._sizes[index])
            self.rereads += int(self._seen[index])
            self._seen[index] = True

    def _make_room(self, layer: int, need_bytes: int) -> bool:
        missing = self._used_bytes + need_bytes - self._capacity_bytes
        if missing <= 0:
            return True
        candidates = np.flatnonzero(self._is_resident & ~self._is_leased)
        if int(self._sizes[candidates].sum()) < missing:
            return False
        for index in self._order(layer, candidates).tolist():
            if missing <= 0:
                break
            self._is_resident[index] = False
            self._used_bytes -= int(self._sizes[index])
            missing -= int(self._sizes[index])
            self.evictions += 1
        return True

    def _order(self, layer: int, candidates: np.ndarray) -> np.ndarray:
        if self._chosen is None:
            return candidates[np.lexsort((candidates, -self._next_use[candidates]))]
        return eviction_order(self._records, self._chosen, layer, candidates)
