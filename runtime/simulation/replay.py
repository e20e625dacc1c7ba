"""Replay a recorded expert trace under any policy and capacity, and under the offline optimum, without reading a byte.

The replay makes the decisions of ExpertCache with prefetch off, so its counts are those of a real run. The offline
optimum evicts what is needed again last. That is the farthest-next-use rule: no policy misses less as long as experts
have equal sizes and one access fits into the capacity; with unequal sizes it is a strong yardstick, not a bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..expert_cache.cache_spec import CacheSpec
from ..expert_cache.counts import CacheStats
from ..expert_cache.eviction import SCORES, ExpertRecords, PolicyScore
from ..expert_cache.instant_cache import InstantCache
from ..trace.trace import Access

OPTIMUM = "optimum"
POPULARITY = "popularity"
NEVER = np.iinfo(np.int64).max


def popularity_score(records: ExpertRecords, running_layer: int) -> np.ndarray:
    """Least often seen in calibration goes first, wherever its layer is."""
    return records.frequency


def replay(
    trace: Sequence[Access],
    spec: CacheSpec,
    policy: str | PolicyScore,
    warm: Sequence[int] = (),
) -> CacheStats:
    """Run a trace of global indices through a cache that starts with `warm`, as far as it fits, first index first.

    Returns its counts; bytes_read leaves the warm start out, as a run's does.
    sizes: bytes per expert, int64 [N]. records: layers and calibration frequencies; its counts are not touched.
    policy: a name of `eviction.SCORES`, `popularity`, `optimum`, or a score.
    Raises MemoryBudgetExceeded if one expert does not fit, KeyError on another name.
    """
    accesses, first_use = with_next_use(trace, len(spec.sizes))
    cache = _ReplayedCache(spec, named_score(policy), first_use)
    cache.fill(warm)
    for layer, experts, next_use in accesses:
        cache.request(layer, experts, next_use=next_use, together=False)
    return cache.stats


def named_score(policy: str | PolicyScore) -> PolicyScore | None:
    """The score of a name that `replay` takes; None for the optimum. Raises KeyError."""
    if not isinstance(policy, str):
        return policy
    scores = {**dict[str, PolicyScore](SCORES.items()), POPULARITY: popularity_score}
    return None if policy == OPTIMUM else scores[policy]


class _ReplayedCache(InstantCache):
    remedy = "simulate a larger cache"


def with_next_use(
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
