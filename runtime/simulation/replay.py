"""Replay a recorded trace of experts under any policy and capacity, and under the offline optimum. Reads no byte.

The replay makes the decisions of PythonCache without prefetch, so its counts are those of a real run.
The offline optimum evicts the expert that is needed again last: the farthest-next-use rule. If experts have equal sizes
and one access fits into the capacity, no policy misses less. With unequal sizes it is a strong baseline and no bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..expert_cache.cache_spec import CacheSpec
from ..expert_cache.cache_stats import CacheStats
from ..expert_cache.instant_cache import InstantCache
from ..expert_cache.policies import SCORES, PolicyScore
from ..trace.trace import Access

OPTIMUM = "optimum"
POPULARITY = "popularity"
NEVER = np.iinfo(np.int64).max
REMEDY = "simulate a larger cache"


def replay(
    trace: Sequence[Access],
    spec: CacheSpec,
    policy: str | PolicyScore,
    warm: Sequence[int] = (),
) -> CacheStats:
    """Run a trace through a cache. Returns its counts. As in a run, bytes_read does not include the warm start.

    trace: layer and stored experts of each access.
    spec: the uses in its records stay as they are.

    policy: a name of `policies.SCORES`, `popularity`, `optimum`, or a score.
    warm: experts in the cache at the start, in order, as far as they fit.
    Raises MemoryBudgetExceeded if one expert does not fit. Raises KeyError for another name.
    """
    accesses, first_use = with_next_use(trace, len(spec.sizes))
    cache = InstantCache(spec, named_score(policy), first_use)
    cache.remedy = REMEDY
    cache.fill(warm)
    for layer, experts, next_use in accesses:
        cache.serve(layer, experts, next_use=next_use, all_at_once=False)
    return cache.stats


def named_score(policy: str | PolicyScore) -> PolicyScore | None:
    """Return the score of a policy of `replay`; None for the optimum. Raises KeyError."""
    if not isinstance(policy, str):
        return policy
    scores = {**dict[str, PolicyScore](SCORES.items()), POPULARITY: lambda records, layer: records.frequency}
    return None if policy == OPTIMUM else scores[policy]


def with_next_use(
    trace: Sequence[Access], count: int
) -> tuple[list[tuple[int, tuple[int, ...], np.ndarray]], np.ndarray]:
    """Return each access with the positions of the next accesses of its experts, and the first access of each expert.

    count: number of experts N.
    Positions are int64, [experts of the access] and [N]; NEVER if there is no such access.
    """
    upcoming = np.full(count, NEVER, np.int64)
    rows: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    for position in range(len(trace) - 1, -1, -1):
        layer, experts = trace[position]
        rows.append((layer, experts, upcoming[list(experts)]))
        upcoming[list(experts)] = position
    rows.reverse()
    return rows, upcoming
