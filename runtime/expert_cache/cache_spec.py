"""The facts from which every kind of expert cache decides, and the states of an expert."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .records import ExpertRecords

ABSENT, QUEUED, LOADING, RESIDENT = range(4)


@dataclass(frozen=True, slots=True, eq=False)
class CacheSpec:
    """Experts of one cache and the memory that they may take.

    sizes: bytes per expert, int64 [N]; 0 for an expert that is left out of its model.
    capacity_bytes: bytes that the experts in the cache may take. They must hold what one token needs in a layer.
    records: layers, calibration frequencies and uses of the experts.
    pin_limit_bytes: bytes that experts read ahead may take.
    """

    sizes: np.ndarray
    capacity_bytes: int
    records: ExpertRecords
    pin_limit_bytes: int = 0
