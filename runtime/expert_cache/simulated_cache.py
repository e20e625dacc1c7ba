"""SimulatedCache: the decisions of PythonCache, without bytes, threads and time.

The caller begins and ends each read: `instant_cache.py` at once, `timeline.py` at the times of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from moec.manifests.errors import MemoryBudgetExceeded

from ..storage.read_runs import ReadRuns
from .cache_spec import RESIDENT, CacheSpec
from .eviction import eviction_order
from .policies import PolicyScore
from .residency import Residency
from .serve_layer import too_large_error


class SimulatedCache(Residency):
    """Residency of N experts.

    spec: the uses in its records stay as they are.
    chosen: score of the policy; None for the optimum, which evicts the expert that is needed again last.
    first_use: position of each expert's first access, int64 [N]. The optimum needs it; None: no position is known.
    runs: experts that are read together; None: one by one.
    """

    def __init__(
        self,
        spec: CacheSpec,
        chosen: PolicyScore | None,
        first_use: np.ndarray | None = None,
        runs: ReadRuns | None = None,
    ) -> None:
        records = spec.records.unused()
        self._next_use = np.zeros(len(spec.sizes), np.int64) if first_use is None else first_use.copy()
        order = self._farthest_use_first if chosen is None else partial(eviction_order, records, chosen)
        super().__init__(replace(spec, records=records), order, runs=runs)

    def fill(self, indices: Sequence[int]) -> None:
        """Fill free capacity in the given order, as in a warm start. Evicts nothing."""
        for index in indices:
            if self.fits_free(index):
                self.begin_warm(index)
                self.arrive_warm(index)

    def is_resident(self, index: int) -> bool:
        """Return whether an expert is resident."""
        return bool(self.state[index] == RESIDENT)

    def begin_sequence(self) -> None:
        """Restart the per-sequence counts of the policy."""
        self._records.begin_sequence()

    def request(
        self, layer: int, experts: Sequence[int], next_use: np.ndarray | None = None
    ) -> tuple[list[int], list[int]]:
        """Request experts, as in Residency.

        next_use: position of the next access of each expert after this one, int64 [len(experts)].
        """
        if next_use is not None:
            self._next_use[list(experts)] = next_use
        return super().request(layer, experts)

    def ready(self, waiting: Sequence[int]) -> list[int]:
        """Return the waiting experts that can be computed, in their order."""
        return [index for index in waiting if self.is_leased[index] and self.state[index] == RESIDENT]

    def unlease(self, indices: Sequence[int]) -> None:
        """Release experts that have been computed."""
        for index in indices:
            if self.is_ahead[index]:
                self.count_use_of_advice(index)
        self.is_leased[list(indices)] = False

    def too_large_error(self, index: int, remedy: str) -> MemoryBudgetExceeded:
        """Return the error for an expert that is larger than the cache."""
        return too_large_error(self.sizes[index], self.capacity_bytes, remedy)

    def _farthest_use_first(self, layer: int, candidates: np.ndarray, count: int) -> np.ndarray:
        return candidates[np.lexsort((candidates, -self._next_use[candidates]))][:count]
