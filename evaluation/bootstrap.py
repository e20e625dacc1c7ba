"""Draws of whole items with replacement, and quantiles of what was drawn."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_CHUNK_ENTRIES = 1 << 18  # item counts per chunk: 2 MB, fits the second-level cache


def resampled_sums(columns: Array, resamples: int, seed: int) -> Array:
    """Return sums of columns [k, n] over `resamples` draws of n items with replacement: [k, resamples].

    Each column is multiplied by the counts of the items. einsum makes the order of addition independent of BLAS
    threads.
    """
    n = columns.shape[1]
    rng = np.random.default_rng(seed)
    sums = np.empty((len(columns), resamples))
    step = max(1, _CHUNK_ENTRIES // n)
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        drawn = rng.integers(0, n, size=(rows, n))
        drawn += np.arange(rows)[:, None] * n
        counts = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n).astype(np.float64)
        for k, column in enumerate(columns):
            sums[k, start : start + rows] = np.einsum("rn,n->r", counts, column)
    return sums


def undefined_as(draws: Array, value: float) -> Array:
    """Replace undefined losses by the far end of a bound, so that they never favour the tested model."""
    return np.where(np.isnan(draws), value, draws)


def quantile(draws: Array, q: float) -> float:
    """Return the smallest draw that a share q of the draws does not exceed.

    Without interpolation, infinite draws stay infinite.
    """
    at = max(0, math.ceil(q * len(draws)) - 1)
    return float(np.partition(draws, at)[at])
