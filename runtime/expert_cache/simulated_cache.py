"""SimulatedCache: the decisions of ExpertCache, without bytes, threads and time.

Who drives it says when a read begins and when it ends: `replay.py` at once, `timeline.py` when a device would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from moec.manifests.errors import MemoryBudgetExceeded

from ..storage.read_runs import ReadRuns
from .cache_spec import CacheSpec
from .eviction import PolicyScore, eviction_order
from .residency import RESIDENT, Residency


class SimulatedCache(Residency):
    """Residency of N experts. chosen None: what is needed again last is evicted first, whatever was advised.

    sizes: bytes per expert, int64 [N]. records: layers and calibration frequencies; its counts are not touched.
    first_use: int64 [N], position of each expert's first access; only read where chosen is None.
    runs: as in Residency.
    """

    def __init__(
        self,
        spec: CacheSpec,
        chosen: PolicyScore | None,
        first_use: np.ndarray,
        runs: ReadRuns | None = None,
    ) -> None:
        records, self._next_use = spec.records.unused(), first_use.copy()
        order = self._farthest_use_first if chosen is None else partial(eviction_order, records, chosen)
        super().__init__(replace(spec, records=records), order, runs=runs)

    def fill(self, indices: Sequence[int]) -> None:
        """The warm start: what fits, in order; evicts nothing and counts as seen."""
        for index in indices:
            if self.fits_free(index):
                self.begin_warm(index)
                self.arrive_warm(index)

    def holds(self, index: int) -> bool:
        """Whether an expert is resident."""
        return bool(self.state[index] == RESIDENT)

    def begin_sequence(self) -> None:
        """What the policy counts within a sequence counts from here."""
        self._records.begin_sequence()

    def ask(
        self, layer: int, experts: Sequence[int], next_use: np.ndarray | None = None
    ) -> tuple[list[int], list[int]]:
        """As in Residency. next_use: positions of the accesses after this one, int64, one per expert."""
        if next_use is not None:
            self._next_use[list(experts)] = next_use
        return super().ask(layer, experts)

    def ready(self, waiting: Sequence[int]) -> list[int]:
        """Those of the waiting experts that can be computed, in their order."""
        return [index for index in waiting if self.is_leased[index] and self.state[index] == RESIDENT]

    def unlease(self, indices: Sequence[int]) -> None:
        """These have been computed and may be evicted."""
        for index in indices:
            if self.is_ahead[index]:
                self.count_use_of_advice(index)
        self.is_leased[list(indices)] = False

    def does_not_fit(self, index: int, remedy: str) -> MemoryBudgetExceeded:
        """Return the error of an expert that is larger than the cache."""
        return MemoryBudgetExceeded(
            f"an expert of {self.sizes[index]} bytes does not fit into the expert cache of {self.capacity_bytes}",
            remedy,
        )

    def _farthest_use_first(self, layer: int, candidates: np.ndarray, count: int) -> np.ndarray:
        return candidates[np.lexsort((candidates, -self._next_use[candidates]))][:count]
