"""Biases of attention scores by distance. A learned table of buckets gives a number for each distance.

Shapes: B buckets, H heads, C context.
Source: T5, section 2.1; transformers, models/switch_transformers.
"""

from __future__ import annotations

import numpy as np

from moec.manifests.model import RelativeBiasSpec

from ..kernels.elementary import natural_log


def distance_buckets(distances: np.ndarray, spec: RelativeBiasSpec, sees_ahead: bool) -> np.ndarray:
    """Return the bucket of each distance, int64. A distance is key position - query position, int64.

    Logarithms are float32, as in reference models. They decide for a distance at the edge of a bucket.
    sees_ahead: whether a query sees later keys, as in an encoder. Half of the buckets are then for such keys.
    Otherwise later keys have distance 0.
    """
    buckets, first = spec.buckets, np.zeros_like(distances)
    if sees_ahead:
        buckets //= 2
        first = np.where(distances > 0, buckets, 0)
        away = np.abs(distances)
    else:
        away = -np.minimum(distances, 0)
    exact = buckets // 2
    ratio = natural_log(np.maximum(away, 1).astype(np.float32) / np.float32(exact)).astype(np.float32)
    wide = ratio / np.float32(natural_log(spec.max_distance / exact)) * np.float32(buckets - exact)
    far = np.minimum(exact + wide.astype(np.int64), buckets - 1)
    return np.asarray(first + np.where(away < exact, away, far), np.int64)


def bias_by_distance(table: np.ndarray, spec: RelativeBiasSpec, context: int, sees_ahead: bool) -> np.ndarray:
    """Return the bias that `kernels.attention` adds to scores: float32 [H, 2 C - 1]; index C - 1 is distance 0.

    table: float32 [B H].
    """
    distances = np.arange(1 - context, context, dtype=np.int64)
    heads = table.reshape(spec.buckets, -1)
    return np.ascontiguousarray(heads[distance_buckets(distances, spec, sees_ahead)].T, dtype=np.float32)
