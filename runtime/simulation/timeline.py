"""Replay a trace with the rates of a device: when each read begins and ends, and so the time of each token.

Events have whole nanoseconds and there is no clock, so equal inputs give equal results. The cache decides as
PythonCache does (`simulated_cache.py`). Reads go through one queue of storage while layers compute.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from ..accelerator.cooperative import CooperationCounts
from ..expert_cache.cache_spec import CacheSpec
from ..expert_cache.cache_stats import CacheStats
from ..expert_cache.policies import PolicyScore
from ..expert_cache.serve_layer import serve_layer
from ..expert_cache.simulated_cache import SimulatedCache
from ..storage.read_runs import ReadRuns
from ..trace.statistics import quantile
from ..trace.trace import Access, TracedPass
from .accelerator_replay import ReplayedDevice, ReplayedSplit
from .replay import named_score, with_next_use

_NS_PER_S = 10**9
Advice = Callable[[TracedPass, int], Sequence[int]]
"""Maps a pass and a layer to the stored experts that are read ahead while the layer runs, likeliest first."""
EventKind = Literal["dense", "experts", "shared", "head", "wait", "read", "ahead"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that takes simulated time.

    kind: `read` brings an expert that a layer waits for, `ahead` one that is read ahead.
    begin_ns, end_ns: simulated times.
    layer: layer that computes or waits, or whose expert is read; None for the head.
    """

    kind: EventKind
    begin_ns: int
    end_ns: int
    layer: int | None


Watch = Callable[[Event], None]
"""Receives every event, in the order of its begin or end."""


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Rates of the storage and the processor of a device.

    storage_bytes_per_s: rate of all reads in sum, for any number of readers.
    storage_latency_ns: time from the begin of a read to its first byte. Several readers overlap it with other reads.
    readers: reads under way at once.

    compute_scale: computing time on the device divided by that on the recording machine.
    """

    storage_bytes_per_s: int
    storage_latency_ns: int
    readers: int
    compute_scale: float


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """Machine on which recorded passes are timed.

    rates: rates of its storage and its processor.
    accelerator: device that computes some of the experts; None without one.
    next_in_file: index of the expert whose bytes follow in the file, as in `read_runs`; None: a read brings one expert.
    watch: receives every event; None: nothing is told.
    """

    rates: DeviceRates
    accelerator: ReplayedDevice | None = None
    next_in_file: Sequence[int] | None = None
    watch: Watch | None = None


@dataclass(frozen=True, slots=True)
class TimedPass:
    """Requests, advice and computing times of one pass. Times are in ns on the recording machine.

    accesses: layer and stored experts of each request. Low versions come after all others.
    advice: stored experts that are read ahead during each layer.

    dense_ns, experts_ns, shared_ns: times of each layer, [L].
    head_ns, other_ns: times of the whole pass.

    preload: stored experts that are read ahead before the first layer.
    loads: tokens of each requested expert, by layer; empty if each has one token.
    """

    tokens: int
    accesses: tuple[Access, ...]
    advice: tuple[tuple[int, ...], ...]
    dense_ns: tuple[float, ...]
    experts_ns: tuple[float, ...]
    shared_ns: tuple[float, ...]
    head_ns: float
    other_ns: float
    preload: tuple[int, ...] = ()
    loads: tuple[tuple[int, ...], ...] = ()

    def tokens_of(self, at: int) -> dict[int, int]:
        """Return the tokens of each expert that the at-th access requests."""
        experts = self.accesses[at][1]
        return dict(zip(experts, self.loads[at] if self.loads else (1,) * len(experts), strict=True))


@dataclass(frozen=True, slots=True)
class Timeline:
    """Predicted times and counts. Decoding is all passes after the prompt, as in RunStatistics.

    policy, capacity_bytes: settings of the cache.
    tokens: tokens that were generated, the first one included.
    ttft_ns: time to the first token.
    tpot_mean_ns, tpot_p50_ns, tpot_p95_ns: time per decoded token; None without one.

    stall: share of decoding in which a layer waited for reads.
    busy: share of decoding in which storage was reading.
    decode_bytes_read_per_token: bytes read in decoding, per decoded token.

    cache: counts of all passes.
    cooperation: where the experts of all passes were computed; None without an accelerator.
    """

    policy: str
    capacity_bytes: int
    tokens: int
    ttft_ns: int
    tpot_mean_ns: int | None
    tpot_p50_ns: int | None
    tpot_p95_ns: int | None
    stall: float
    busy: float
    decode_bytes_read_per_token: float
    cache: CacheStats
    cooperation: CooperationCounts | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Decoded tokens per second; None without one."""
        return _NS_PER_S / self.tpot_mean_ns if self.tpot_mean_ns else None

    def to_plain(self) -> dict[str, Any]:
        values = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("cache", "cooperation")
        }
        shared = None if self.cooperation is None else asdict(self.cooperation)
        return {**values, **self.cache.replayable_counts(), "tokens_per_s": self.tokens_per_s, "experts": shared}


def timed_pass(traced: TracedPass, first_expert: Sequence[int], advice: Advice) -> TimedPass:
    """Return a recorded pass with other advice. first_expert: offset of each layer's experts, [L + 1]."""
    return TimedPass(
        tokens=traced.tokens,
        accesses=tuple(traced.accesses(first_expert)),
        advice=tuple(tuple(advice(traced, layer)) for layer, _ in enumerate(traced.chosen, traced.first_layer)),
        dense_ns=traced.dense_ns,
        experts_ns=traced.experts_ns,
        shared_ns=traced.shared_ns,
        head_ns=traced.head_ns,
        other_ns=traced.other_ns,
        loads=()
        if traced.tokens == 1
        else tuple(tuple(dict(sorted(Counter(c).items())).values()) for c in traced.chosen),
    )


def predict_steps(
    steps: Sequence[Sequence[TimedPass]],
    prompt_steps: int,
    spec: CacheSpec,
    policy: str | PolicyScore,
    machine: SimulatedMachine,
    warm: Sequence[int] = (),
) -> Timeline:
    """Predict the times of passes that are ready to run.

    steps: passes of each step. The prompt has the first steps, then each token has one.
    prompt_steps: steps of the prompt.
    spec, policy, warm: as in `replay`.
    Raises MemoryBudgetExceeded if one layer's experts of a token do not fit, KeyError on an unknown policy.
    """
    flat = [access for step in steps for timed in step for access in timed.accesses]
    with_use, first_use = with_next_use(flat, len(spec.sizes))
    runs = None
    if machine.next_in_file is not None:
        runs = ReadRuns(spec.sizes.tolist(), machine.next_in_file, machine.rates.readers)
    cache = SimulatedCache(spec, named_score(policy), first_use, runs)
    cache.fill(warm)
    run, accesses, marks = _Run(cache, machine, spec.records.layer.tolist()), iter(with_use), []
    for step in steps:
        for timed in step:
            run.run_pass(timed, [next(accesses) for _ in timed.accesses])
        marks.append((run.now_ns, run.stall_ns, run.storage.busy_ns, cache.stats.bytes_read))
    timeline = _summary(cache, policy if isinstance(policy, str) else "custom", prompt_steps, marks)
    return timeline if machine.accelerator is None else replace(timeline, cooperation=run.counts)


def _summary(
    cache: SimulatedCache, policy: str, prompt_passes: int, marks: Sequence[tuple[int, int, int, int]]
) -> Timeline:
    """Return the timeline. marks: time, stall, busy time and bytes read at the end of each step."""
    start, end, count = marks[prompt_passes - 1], marks[-1], len(marks) - prompt_passes
    ends = [mark[0] for mark in marks[prompt_passes - 1 :]]
    steps = [later - earlier for earlier, later in pairwise(ends)]
    total_ns = max(1, end[0] - start[0])
    return Timeline(
        policy=policy,
        capacity_bytes=cache.capacity_bytes,
        tokens=count + 1,
        ttft_ns=start[0],
        tpot_mean_ns=round(sum(steps) / count) if count else None,
        tpot_p50_ns=quantile(steps, 0.5),
        tpot_p95_ns=quantile(steps, 0.95),
        stall=(end[1] - start[1]) / total_ns,
        busy=min(1.0, (end[2] - start[2]) / total_ns),
        decode_bytes_read_per_token=(end[3] - start[3]) / max(count, 1),
        cache=cache.stats,
    )


class _Storage:
    """Readers that take the most urgent reads, and one stream of bytes that they share.

    layers: layer of each stored expert.
    """

    def __init__(self, cache: SimulatedCache, machine: SimulatedMachine, layers: Sequence[int]) -> None:
        self._cache, self._rates, self._watch, self._layers = cache, machine.rates, machine.watch, layers
        self._under_way = deque[tuple[int, list[int]]]()
        self._free_ns = 0
        self.busy_ns = 0

    def begin(self, now_ns: int) -> None:
        """Let idle readers begin queued reads."""
        while len(self._under_way) < self._rates.readers:
            run = self._cache.next_read()
            if not run:
                return
            size_bytes = sum(self._cache.sizes[index] for index in run)
            begins_ns = max(now_ns + self._rates.storage_latency_ns, self._free_ns)
            ends_ns = begins_ns + math.ceil(size_bytes * _NS_PER_S / self._rates.storage_bytes_per_s)
            self.busy_ns += ends_ns - max(now_ns, self._free_ns)
            self._free_ns = ends_ns
            self._under_way.append((ends_ns, run))
            if self._watch is not None:
                kind: EventKind = "ahead" if self._cache.is_ahead[run[0]] else "read"
                self._watch(Event(kind, now_ns, ends_ns, self._layers[run[0]]))

    def run_until(self, now_ns: int) -> None:
        """End all reads that end by then. Each end begins the next queued read."""
        while self._under_way and self._under_way[0][0] <= now_ns:
            self._end_first()

    def run_to_next(self) -> int | None:
        """End the next read. Returns the time of its end, or None without reads."""
        return self._end_first() if self._under_way else None

    def _end_first(self) -> int:
        ends_ns, run = self._under_way.popleft()
        for index in run:
            self._cache.arrive(index)
        self.begin(ends_ns)
        return ends_ns


class _Run:
    """A model of which only the time is simulated.

    layers: layer of each stored expert.
    counts: where its experts were computed.
    """

    def __init__(self, cache: SimulatedCache, machine: SimulatedMachine, layers: Sequence[int]) -> None:
        self._cache, self._scale, self._shared = cache, machine.rates.compute_scale, machine.accelerator
        self.storage, self.counts = _Storage(cache, machine, layers), CooperationCounts()
        self._watch, self._layer = machine.watch, 0
        self.now_ns = self.stall_ns = 0

    def run_pass(self, timed: TimedPass, accesses: Sequence[tuple[int, tuple[int, ...], np.ndarray]]) -> None:
        """Run all layers, then the head.

        accesses: layer, experts and the positions of their next uses.
        """
        other_ns = timed.other_ns / len(accesses)
        if preload := self._absent(timed.preload):
            self._cache.advise(preload)
            self.storage.begin(self.now_ns)
        for at, (layer, experts, next_use) in enumerate(accesses):
            self._layer = layer
            self._compute(timed.dense_ns[at] + other_ns, "dense")
            split = None
            if self._shared is not None:
                is_in_host, tokens = self._cache.is_resident, timed.tokens_of(at)
                split = ReplayedSplit(self._shared, tokens, is_in_host, self.counts, self.now_ns)
            requested = list(experts) if split is None else split.host_experts
            upcoming = next_use[[experts.index(expert) for expert in requested]]
            hits, misses = self._cache.request(layer, requested, upcoming)
            self._cache.queue_and_lease(misses)
            self.storage.begin(self.now_ns)
            self._run_experts(timed, at, hits, misses, split)
        self._compute(timed.head_ns, "head")

    def _absent(self, experts: Sequence[int]) -> list[int]:
        """Return the experts that are not resident on the accelerator."""
        return [index for index in experts if self._shared is None or index not in self._shared.resident]

    def _run_experts(
        self, timed: TimedPass, at: int, hits: list[int], misses: list[int], split: ReplayedSplit | None
    ) -> None:
        """Compute hits, then misses as they arrive. Experts of one token are computed at once, others one by one.

        The shared expert is computed after the first ones.
        """
        times, shared_ns, advice = self._expert_times(timed, at), timed.shared_ns[at], self._absent(timed.advice[at])
        is_one = timed.tokens == 1 and (split is None or split.comes_together)
        for ready in serve_layer(self, hits, misses, lambda: advice, is_one):
            self._take(ready, times, shared_ns, split)
            shared_ns = 0
        self._compute(shared_ns, "shared")
        if split is not None:
            self._go_on(split.finish(self.now_ns))

    def _expert_times(self, timed: TimedPass, at: int) -> dict[int, float]:
        """Return the time of each expert on the recording machine's processor.

        They have equal times. With an accelerator, which takes some of them, their times depend on their tokens.
        """
        tokens = timed.tokens_of(at)
        if self._shared is None:
            return dict.fromkeys(tokens, timed.experts_ns[at] / max(len(tokens), 1))
        cpu_ns = {expert: self._shared.latency.cpu_ns(count) for expert, count in tokens.items()}
        whole = sum(cpu_ns.values()) or 1.0
        return {expert: timed.experts_ns[at] * expert_ns / whole for expert, expert_ns in cpu_ns.items()}

    def _take(
        self, experts: Sequence[int], times: Mapping[int, float], shared_ns: float, split: ReplayedSplit | None
    ) -> None:
        """Begin the copies among experts in host memory. Compute the others, then the shared expert."""
        if split is not None:
            experts, begun_ns = split.take(experts, self.now_ns)
            self._go_on(begun_ns)
        self._compute(sum(times[expert] for expert in experts) + shared_ns, "experts")

    def prefetch(self, indices: Sequence[int]) -> None:
        """Begin the reads of advice, as far as storage is free."""
        self._cache.advise(indices)
        self.storage.begin(self.now_ns)

    def unlease(self, indices: Sequence[int]) -> None:
        self._cache.unlease(indices)

    def wait_for_some(self, remaining: list[int], all_at_once: bool) -> list[int]:
        """Let time pass until a remaining expert is resident."""
        started_ns = self.now_ns
        while True:
            self._cache.queue_and_lease(remaining)
            self.storage.begin(self.now_ns)
            ready = self._cache.ready(remaining)
            if ready:
                self.stall_ns += self.now_ns - started_ns
                self._tell("wait", started_ns)
                return ready if all_at_once else ready[:1]
            arrived_ns = self.storage.run_to_next()
            if arrived_ns is None:
                raise self._cache.too_large_error(remaining[0], "simulate a larger cache")
            self.now_ns = arrived_ns

    def _compute(self, recorded_ns: float, kind: EventKind) -> None:
        """Let a computation pass. recorded_ns: its time on the recording machine."""
        begun_ns = self.now_ns
        self._go_on(begun_ns + recorded_ns * self._scale)
        self._tell(kind, begun_ns)

    def _tell(self, kind: EventKind, begun_ns: int) -> None:
        """Tell an event that ends at this moment. An event without time is told if it ends a pass."""
        if self._watch is not None and (self.now_ns > begun_ns or kind == "head"):
            self._watch(Event(kind, begun_ns, self.now_ns, None if kind == "head" else self._layer))

    def _go_on(self, until_ns: float) -> None:
        """Let time pass. Reads go on."""
        self.now_ns = round(until_ns)
        self.storage.run_until(self.now_ns)
