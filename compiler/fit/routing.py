"""Routing as trained models have it: the share of a token's experts that memory holds, before the model is here.

The score of an expert is the sum of two normal numbers: one is the same for all tokens, the other is the token's own.
The share of the first in the variance decides how much more popular some experts are than others. The cache holds the
most popular ones (`expected_misses`).

With a share of 0.22 it misses 6, 19 and 46 % of the experts of OLMoE's shape if it holds 75, 50 and 25 % of them. The
yardstick, whose routing lies in the ranges of trained models, misses 5, 21 and 44 % (bench/yardstick, LRFU). Shares of
0.1 and 0.4 are the ends of the range.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

COMMON_SHARE, LOW_SHARE, HIGH_SHARE = 0.22, 0.1, 0.4
"""Shares of the variance that all tokens have in common: the usual one, and the ends of the range."""
_TOKENS, _LAYERS = 512, 4


@lru_cache(maxsize=64)
def popularity(count: int, top_k: int, common_share: float) -> tuple[float, ...]:
    """Return the share of all uses that falls on each expert of a layer, the most popular first, [count]."""
    generator = np.random.default_rng(0)
    total = np.zeros(count)
    for _ in range(_LAYERS):
        common = generator.standard_normal(count) * common_share**0.5
        scores = common + generator.standard_normal((_TOKENS, count)) * (1 - common_share) ** 0.5
        chosen = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
        total += np.sort(np.bincount(chosen.ravel(), minlength=count))[::-1]
    return tuple((total / total.sum()).tolist())
