"""Where each expert of a layer runs: a pure function of tokens, bytes and latencies.

An expert on the device runs there. For any other there is a choice: the processor computes it, or its weights are
copied and the device does. `published` is the rule of Twiddler (section 3.3, algorithm 1), expert by expert: copy where
cpu_lat(s) > gpu_lat(s) + transfer_lat(). It counts times as if one followed the other. Processor, link and device work
at the same time, copies wait for each other on the link and for a slot, so `auto` minimises when the layer is done: the
experts with the most tokens are copied, as many as bring that time to its least. Then experts on the device whose bytes
the host has as well move to the processor, those with the fewest tokens first, as long as that helps: small experts can
be faster here than their kernels start there. `gpu` copies all (HOBBIT's GPU-centric mode), `cpu` none (its cooperative
mode).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from ..options.runtime import Cooperation
from .device import COPY_SLOTS
from .latency import LatencyModel

_MAX_TRIALS = 64
"""Numbers of copies that are compared; of a layer with more missing experts, evenly spaced ones and both ends."""


class Action(Enum):
    """Where an expert runs."""

    RESIDENT = "resident"
    COPY = "copy"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """What a layer asks of one expert. index: among the stored experts; size_bytes: of its copy.

    is_resident: it is on the device; is_in_host: and in the host's memory as well.
    """

    index: int
    tokens: int
    size_bytes: int
    is_resident: bool
    is_in_host: bool = False


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """actions: of every expert. order: those that need their host bytes, in the order in which to begin them.

    predicted_ns: until the last is done, by the model.
    """

    actions: dict[int, Action]
    order: tuple[int, ...]
    predicted_ns: float

    def count(self, action: Action) -> int:
        """Experts that this happens to."""
        return sum(each is action for each in self.actions.values())


def expert_loads(
    tokens: Mapping[int, int], sizes: Sequence[int], residents: Container[int], is_in_host: Callable[[int], bool]
) -> list[ExpertLoad]:
    """What a layer asks of its experts. tokens: of each; sizes: bytes of a copy of every stored expert."""
    loads = []
    for index, count in tokens.items():
        is_resident = index in residents
        loads.append(ExpertLoad(index, count, sizes[index], is_resident, is_resident and is_in_host(index)))
    return loads


def plan_layer(
    loads: Sequence[ExpertLoad], latency: LatencyModel, cooperation: Cooperation, slots: int = COPY_SLOTS
) -> LayerPlan:
    """Decide for the experts of one layer; no expert twice. slots: copies on the device at once."""
    ranked = sorted(
        loads, key=lambda load: (-load.tokens, load.size_bytes, load.is_resident, load.is_in_host, load.index)
    )
    kinds = tuple((load.tokens, load.size_bytes, load.is_resident, load.is_in_host) for load in ranked)
    found = _plan_kinds(kinds, latency, cooperation, slots)
    actions = {ranked[at].index: action for at, action in found.actions.items()}
    return LayerPlan(actions, tuple(ranked[at].index for at in found.order), found.predicted_ns)


# A plan does not depend on which experts they are, and the layers of decoding are much alike: a plan of eight experts
# takes 130 us, finding it again 7.
@lru_cache(maxsize=1024)
def _plan_kinds(
    kinds: tuple[tuple[int, int, bool, bool], ...], latency: LatencyModel, cooperation: Cooperation, slots: int
) -> LayerPlan:
    """As `plan_layer`, for experts named by their places."""
    layer = _Layer([ExpertLoad(at, *kind) for at, kind in enumerate(kinds)], latency, slots)
    if cooperation == "auto":
        return layer.plan(layer.best())
    if cooperation == "published":
        return layer.plan(layer.published())
    return layer.plan(layer.split(len(layer.missing) if cooperation == "gpu" else 0, 0))


def pays_alone(load: ExpertLoad, latency: LatencyModel) -> bool:
    """Whether copying one expert is faster than computing it here. Source: Twiddler, algorithm 1, line 12."""
    return latency.cpu_ns(load.tokens) > latency.device_ns(load.tokens) + latency.transfer_ns(load.size_bytes)


def schedule(
    copies: Sequence[ExpertLoad],
    computed: Sequence[ExpertLoad],
    latency: LatencyModel,
    device_ns: float = 0.0,
    slots: int = COPY_SLOTS,
) -> tuple[tuple[int, ...], float]:
    """In which order the processor begins copies and computes the others, and when everything is done, in ns.

    A copy is begun as soon as a slot is free, else the processor computes; with nothing left to compute it waits.
    device_ns: what the device has to do before the first copy arrives.
    """
    jobs = [[_job(load, latency) for load in part] for part in (copies, computed)]
    return _run(jobs[0], jobs[1], device_ns, slots)


class _Job(NamedTuple):
    """An expert and what it would take, in ns."""

    expert: int
    cpu_ns: float
    device_ns: float
    staging_ns: float
    link_ns: float


def _job(load: ExpertLoad, latency: LatencyModel) -> _Job:
    size = load.size_bytes
    cpu_ns, device_ns = latency.cpu_ns(load.tokens), latency.device_ns(load.tokens)
    return _Job(load.index, cpu_ns, device_ns, latency.staging_ns(size), latency.link_ns(size))


def _run(
    copies: Sequence[_Job], computed: Sequence[_Job], device_ns: float, slots: int
) -> tuple[tuple[int, ...], float]:
    """As `schedule`."""
    order, ends = list[int](), list[float]()
    cpu_ns = link_ns = 0.0
    copied = done = 0
    while copied < len(copies) or done < len(computed):
        free_ns = ends[copied - slots] if copied >= slots else 0.0
        if copied < len(copies) and (free_ns <= cpu_ns or done == len(computed)):
            job = copies[copied]
            copied += 1
            cpu_ns = max(cpu_ns, free_ns) + job.staging_ns
            link_ns = max(link_ns, cpu_ns) + job.link_ns
            device_ns = max(device_ns, link_ns) + job.device_ns
            ends.append(device_ns)
        else:
            job = computed[done]
            done += 1
            cpu_ns += job.cpu_ns
        order.append(job.expert)
    return tuple(order), max(cpu_ns, device_ns)


@dataclass(frozen=True, slots=True)
class _Split:
    """Who gets what. copied: of the missing; moved: from the device to the processor; order, makespan_ns: then."""

    copied: frozenset[int]
    moved: frozenset[int]
    order: tuple[int, ...]
    makespan_ns: float


class _Layer:
    """The experts of one layer. missing: in the order of copies, most tokens first; movable: the same, last first."""

    def __init__(self, loads: Sequence[ExpertLoad], latency: LatencyModel, slots: int) -> None:
        self._loads, self._latency, self._slots = loads, latency, slots
        ranked = sorted(loads, key=lambda load: (-load.tokens, load.size_bytes, load.index))
        self._ranked = [(load, _job(load, latency)) for load in ranked]
        self.missing = [job for load, job in self._ranked if not load.is_resident]
        self.movable = [job for load, job in self._ranked if load.is_resident and load.is_in_host]
        self._resident_ns = sum(job.device_ns for load, job in self._ranked if load.is_resident)

    def published(self) -> _Split:
        """Copies where it pays alone."""
        copied = {load.index for load in self._loads if not load.is_resident and pays_alone(load, self._latency)}
        return self._split(copied, set())

    def split(self, copies: int, moved: int) -> _Split:
        """With the first so many of the missing copied, and the last so many of the movable moved."""
        last = self.movable[len(self.movable) - moved :]
        return self._split({job.expert for job in self.missing[:copies]}, {job.expert for job in last})

    def best(self) -> _Split:
        """First how many to copy, then how many to move, with these copies or none."""
        best = self._better(self.published(), [(copies, 0) for copies in _counts(len(self.missing))])
        if not self.movable:
            return best
        found = len(best.copied)
        return self._better(best, [(copies, moved) for moved in _counts(len(self.movable)) for copies in {found, 0}])

    def _better(self, best: _Split, trials: Sequence[tuple[int, int]]) -> _Split:
        """The best of a split and some others, most promising first: most need not be scheduled."""
        for least_ns, copies, moved in sorted((self._least_ns(*trial), *trial) for trial in trials):
            if least_ns >= best.makespan_ns:
                break
            best = min(best, self.split(copies, moved), key=lambda split: split.makespan_ns)
        return best

    def _least_ns(self, copies: int, moved: int) -> float:
        """A split cannot end earlier: each side's own work, without any waiting."""
        copied, own, last = self.missing[:copies], self.missing[copies:], self.movable[len(self.movable) - moved :]
        cpu_ns = (
            sum(job.staging_ns for job in copied) + sum(job.cpu_ns for job in own) + sum(job.cpu_ns for job in last)
        )
        device_ns = self._resident_ns - sum(job.device_ns for job in last) + sum(job.device_ns for job in copied)
        link_ns = sum(job.link_ns for job in copied)
        # Sums in another order than the schedule's: a bound by a hair too high would hide the better split.
        return max(cpu_ns, device_ns, link_ns) * (1 - 1e-12)

    def _split(self, copied: Set[int], moved: Set[int]) -> _Split:
        device_ns = sum(job.device_ns for load, job in self._ranked if load.is_resident and job.expert not in moved)
        waiting = [job for job in self.missing if job.expert in copied]
        own = [
            job
            for load, job in reversed(self._ranked)
            if (job.expert in moved if load.is_resident else job.expert not in copied)
        ]
        return _Split(frozenset(copied), frozenset(moved), *_run(waiting, own, device_ns, self._slots))

    def plan(self, split: _Split) -> LayerPlan:
        """What it means for every expert."""
        actions = {}
        for load in self._loads:
            if load.is_resident and load.index not in split.moved:
                actions[load.index] = Action.RESIDENT
            else:
                actions[load.index] = Action.COPY if load.index in split.copied else Action.CPU
        return LayerPlan(actions, split.order, split.makespan_ns)


def _counts(most: int) -> list[int]:
    """Numbers from 0 to most, both there, at most _MAX_TRIALS of them between."""
    return [*range(0, most, -(-most // _MAX_TRIALS) or 1), most]
