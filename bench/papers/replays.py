"""Replays of traces under eviction policies that the runtime has, and under first-in-first-out and random eviction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moec.cli.simulation.traces import ReplayedBundle, replayed_bundle
from moec.compiler.calibration.activation_paths import count_popularity
from moec.manifests.quant import EXPERT_ALIGNMENT_BYTES
from moec.runtime.expert_cache.cache_spec import CacheSpec
from moec.runtime.expert_cache.cache_stats import CacheStats
from moec.runtime.expert_cache.instant_cache import InstantCache
from moec.runtime.expert_cache.policies import PolicyScore
from moec.runtime.expert_cache.records import ExpertRecords, expert_records, warm_order
from moec.runtime.simulation.replay import OPTIMUM, named_score, with_next_use
from moec.runtime.storage.read_runs import NONE
from moec.runtime.trace.trace import Access

from ..prefetch.learned_routers import PASS_TOKENS
from .inputs import Inputs
from .models import Model

FIFO, RANDOM = "fifo", "random"
TEXT_TOKENS = 96
"""Tokens of a text whose requests come from the routes of a checkpoint."""
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


def held_out_texts(inputs: Inputs, model: Model, count: int) -> tuple[ReplayedBundle, list[list[Access]]]:
    """Return what replays need of a model, and its requests on held-out texts.

    A model in the tree has traces of its bundle in 16 bits. Another one has the routes of its checkpoint.
    """
    if not model.made_by:
        return recorded_texts(inputs, f"{model.name}-16", count)
    counted, tested = (inputs.routes(model, split).chosen for split in ("train", "test"))
    return equal_experts(counted), requests_of(tested[: count * PASS_TOKENS])


def equal_experts(counted: np.ndarray) -> ReplayedBundle:
    """Return experts of one page each, with the use by tokens. counted: experts of these tokens, [T, L, K]."""
    experts, (_, layers, top_k) = int(counted.max()) + 1, counted.shape
    used = count_popularity(counted, experts).ravel()
    records = expert_records(np.repeat(np.arange(layers, dtype=np.int32), experts), used, layers)
    sizes = np.full(used.size, EXPERT_ALIGNMENT_BYTES, np.int64)
    following = [*range(1, used.size), NONE]
    minimum = top_k * EXPERT_ALIGNMENT_BYTES
    return ReplayedBundle(sizes, records, warm_order(records).tolist(), minimum, used.size, following)


def requests_of(chosen: np.ndarray) -> list[list[Access]]:
    """Return the requests of the first TEXT_TOKENS tokens of each pass. chosen: experts of the tokens, [T, L, K]."""
    experts = int(chosen.max()) + 1
    first = experts * np.arange(chosen.shape[1])[:, None]
    passes = np.sort(chosen + first, axis=2).reshape(-1, PASS_TOKENS, *chosen.shape[1:])[:, :TEXT_TOKENS]
    return [[(layer, tuple(row)) for token in text for layer, row in enumerate(token)] for text in passes.tolist()]


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
