"""Replays of traces under eviction policies that the runtime has, and under first-in-first-out and random eviction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moec.cli.simulation.traces import ReplayedBundle, replayed_bundle
from moec.runtime.expert_cache.cache_spec import CacheSpec
from moec.runtime.expert_cache.cache_stats import CacheStats
from moec.runtime.expert_cache.instant_cache import InstantCache
from moec.runtime.expert_cache.policies import PolicyScore
from moec.runtime.expert_cache.records import ExpertRecords
from moec.runtime.simulation.replay import OPTIMUM, named_score, with_next_use
from moec.runtime.trace.trace import Access

from .inputs import Inputs

FIFO, RANDOM = "fifo", "random"
SEED = 0


class ArrivalScore:
    """A policy: the expert that arrived first is evicted first."""

    def __init__(self, count: int) -> None:
        self._arrived, self._clock = np.zeros(count), 0

    def note(self, index: int) -> None:
        """Note that an expert has arrived."""
        self._clock += 1
        self._arrived[index] = self._clock

    def __call__(self, records: ExpertRecords, running_layer: int) -> np.ndarray:
        """Return the time of each expert's arrival."""
        return self._arrived


class ArrivalCache(InstantCache):
    """A cache that evicts the expert that arrived first."""

    def __init__(self, spec: CacheSpec, first_use: np.ndarray) -> None:
        self._arrivals = ArrivalScore(len(spec.sizes))
        super().__init__(spec, self._arrivals, first_use)

    def arrive(self, index: int) -> None:
        """End the read of an expert."""
        self._arrivals.note(index)
        super().arrive(index)

    def arrive_warm(self, index: int) -> None:
        """End the read of an expert of the warm start."""
        self._arrivals.note(index)
        super().arrive_warm(index)


def random_score(count: int) -> PolicyScore:
    """Return a policy that evicts a random expert, the same ones in each run."""
    source = np.random.default_rng(SEED)
    return lambda records, running_layer: source.random(count)


def recorded_texts(inputs: Inputs, bundle: str, count: int) -> tuple[ReplayedBundle, list[list[Access]]]:
    """Return a bundle for replays, and its requests on the first held-out texts."""
    replayed = replayed_bundle(inputs.opened(bundle))
    return replayed, [trace.accesses() for trace in inputs.traces(bundle, count)]


def replay_texts(
    replayed: ReplayedBundle, texts: Sequence[Sequence[Access]], capacity_bytes: int, policy: str | PolicyScore
) -> CacheStats:
    """Run the requests of several texts through one cache, without reading ahead. Each text begins a sequence.

    policy: a name of `replay`, FIFO, RANDOM, or a score.
    """
    spec, count = replayed.cache_spec(capacity_bytes), len(replayed.sizes)
    rows, first_use = with_next_use([access for text in texts for access in text], count)
    makers: dict[str, Callable[[], InstantCache]] = {
        FIFO: lambda: ArrivalCache(spec, first_use),
        RANDOM: lambda: InstantCache(spec, random_score(count), first_use),
        OPTIMUM: lambda: InstantCache(spec, None, first_use),
    }
    own = makers.get(policy) if isinstance(policy, str) else None
    cache = InstantCache(spec, named_score(policy), first_use) if own is None else own()
    cache.fill(replayed.warm)
    requests = iter(rows)
    for text in texts:
        cache.begin_sequence()
        for _ in text:
            layer, experts, next_use = next(requests)
            cache.serve(layer, experts, next_use=next_use, all_at_once=False)
    return cache.stats
