"""The first of many by a score, in numpy: what the extension's `largest` is held to."""

from __future__ import annotations

import numpy as np


def largest(values: np.ndarray, count: int) -> tuple[list[int], list[float]]:
    """Indices of the largest values, at most `count`, and these values, largest first; ties: lowest index first.

    values: floats [n]; what is no number comes last.
    """
    order = np.argsort(-values, kind="stable")[:count]
    return order.tolist(), values[order].tolist()
