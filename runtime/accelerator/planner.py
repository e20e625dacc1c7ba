"""Decide where each expert of a layer runs: a pure function of tokens, bytes and latencies.

An expert on the device runs there. For another expert there is a choice.
Either the CPU computes it, or its weights are copied and the device computes it. Four rules exist:

* `twiddler` is the rule of Twiddler (section 3.3, algorithm 1), applied to each expert.
  It copies if cpu_lat(s) > gpu_lat(s) + transfer_lat(). It adds times as if the steps ran one after the other.
* `auto` minimises the end time of the layer. CPU, link and device work at the same time.
  Copies wait for each other on the link, and for a slot.
  The experts with the most tokens are copied, as many as minimise that time.
  Then resident experts that are also in host memory move to the CPU, fewest tokens first, as long as that helps.
  A small expert can finish on the CPU before the device has started its kernels.
* `gpu` copies all experts (HOBBIT's GPU-centric mode).
* `cpu` copies none (HOBBIT's cooperative mode).
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
"""Most numbers of copies that are compared.

For a layer with more missing experts they are evenly spaced and include both ends.
"""


class Action(Enum):
    """The side that runs an expert."""

    RESIDENT = "resident"
    COPY = "copy"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The work of a layer for one expert.

    index: index among the stored experts.
    size_bytes: size of its copy.
    is_resident: whether it is on the device.
    is_in_host: whether it is on the device and also in host memory.
    """

    index: int
    tokens: int
    size_bytes: int
    is_resident: bool
    is_in_host: bool = False


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A plan of a layer: where its experts run.

    actions: action of each expert.
    order: experts whose bytes are needed in host memory, in the order in which to begin them.

    predicted_ns: predicted time until the last expert is done.
    """

    actions: dict[int, Action]
    order: tuple[int, ...]
    predicted_ns: float

    def count(self, action: Action) -> int:
        """Return the number of experts with this action."""
        return sum(planned is action for planned in self.actions.values())


def expert_loads(
    tokens: Mapping[int, int], sizes: Sequence[int], residents: Container[int], is_in_host: Callable[[int], bool]
) -> list[ExpertLoad]:
    """Return the work of a layer for each of its experts.

    tokens: number of tokens of each expert.
    sizes: bytes of a copy of each stored expert.
    """
    loads = []
    for index, count in tokens.items():
        is_resident = index in residents
        loads.append(ExpertLoad(index, count, sizes[index], is_resident, is_resident and is_in_host(index)))
    return loads


def plan_layer(loads: Sequence[ExpertLoad], latency: LatencyModel, cooperation: Cooperation) -> LayerPlan:
    """Plan the experts of one layer. No expert occurs twice."""
    ranked = sorted(
        loads, key=lambda load: (-load.tokens, load.size_bytes, load.is_resident, load.is_in_host, load.index)
    )
    kinds = tuple((load.tokens, load.size_bytes, load.is_resident, load.is_in_host) for load in ranked)
    plan = _plan_kinds(kinds, latency, cooperation)
    actions = {ranked[at].index: action for at, action in plan.actions.items()}
    return LayerPlan(actions, tuple(ranked[at].index for at in plan.order), plan.predicted_ns)


# A plan depends on tokens, sizes and residence of the experts, not on their indices, and the layers of decoding are
# alike. Making a plan of eight experts takes 130 us, finding it in the cache 7 us.
@lru_cache(maxsize=256)
def _plan_kinds(
    kinds: tuple[tuple[int, int, bool, bool], ...], latency: LatencyModel, cooperation: Cooperation
) -> LayerPlan:
    """Return the plan of `plan_layer`, with experts named by their rank in `kinds`."""
    layer = _Layer([ExpertLoad(at, *kind) for at, kind in enumerate(kinds)], latency)
    if cooperation == "auto":
        return layer.plan(layer.best())
    if cooperation == "twiddler":
        return layer.plan(layer.twiddler_split())
    return layer.plan(layer.split(len(layer.missing) if cooperation == "gpu" else 0, 0))


def pays_alone(load: ExpertLoad, latency: LatencyModel) -> bool:
    """Return whether copying this expert is faster than computing it on the CPU.

    Source: Twiddler, algorithm 1, line 12.
    """
    device_ns = latency.layer_ns + latency.device_ns(load.tokens)
    return latency.cpu_ns(load.tokens) > device_ns + latency.transfer_ns(load.size_bytes)


class Job(NamedTuple):
    """An expert and its times in ns."""

    expert: int
    cpu_ns: float
    device_ns: float
    staging_ns: float
    link_ns: float


def job_of(load: ExpertLoad, latency: LatencyModel) -> Job:
    size = load.size_bytes
    cpu_ns, device_ns = latency.cpu_ns(load.tokens), latency.device_ns(load.tokens)
    return Job(load.index, cpu_ns, device_ns, latency.staging_ns(size), latency.link_ns(size))


def schedule(
    copies: Sequence[Job], computed: Sequence[Job], device_ns: float, slots: int = COPY_SLOTS, begun_ns: float = 0.0
) -> tuple[tuple[int, ...], float]:
    """Return the order in which the CPU begins copies and computes experts, and the end time of the layer in ns.

    A copy begins as soon as a slot is free. Until then the CPU computes. It waits if nothing is left to compute.
    copies: experts that are copied.
    computed: experts that the CPU computes.
    device_ns: time that the device needs before the first copy arrives.
    slots: most copies on the device at once.
    begun_ns: time at which the CPU has begun the device's work.
    """
    order, ends = list[int](), list[float]()
    cpu_ns, link_ns = begun_ns, 0.0
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
    """A division of a layer between CPU and device.

    copied: missing experts that are copied.
    moved: experts that move from the device to the CPU.
    order, makespan_ns: the schedule of this division and its end time.
    """

    copied: frozenset[int]
    moved: frozenset[int]
    order: tuple[int, ...]
    makespan_ns: float


class _Layer:
    """The experts of one layer.

    missing: experts that are not on the device, most tokens first. The first ones are copied.

    movable: experts on the device and in host memory, most tokens first. The last ones are moved to the CPU.
    """

    def __init__(self, loads: Sequence[ExpertLoad], latency: LatencyModel) -> None:
        self._loads, self._latency = loads, latency
        ranked = sorted(loads, key=lambda load: (-load.tokens, load.size_bytes, load.index))
        self._ranked = [(load, job_of(load, latency)) for load in ranked]
        self.missing = [job for load, job in self._ranked if not load.is_resident]
        self.movable = [job for load, job in self._ranked if load.is_resident and load.is_in_host]
        self._resident_ns = sum(job.device_ns for load, job in self._ranked if load.is_resident)
        self._residents = sum(load.is_resident for load in loads)

    def twiddler_split(self) -> _Split:
        """Return the split that copies each expert for which a copy alone is faster."""
        copied = {load.index for load in self._loads if not load.is_resident and pays_alone(load, self._latency)}
        return self._split(copied, set())

    def split(self, copies: int, moved: int) -> _Split:
        """Return the split that copies the first `copies` missing experts and moves the last `moved` movable ones."""
        last = self.movable[len(self.movable) - moved :]
        return self._split({job.expert for job in self.missing[:copies]}, {job.expert for job in last})

    def best(self) -> _Split:
        """Return the fastest split. First choose how many to copy, then how many to move, with these copies or none."""
        best = self._better(self.twiddler_split(), [(copies, 0) for copies in _counts(len(self.missing))])
        if not self.movable:
            return best
        best_copies = len(best.copied)
        return self._better(
            best, [(copies, moved) for moved in _counts(len(self.movable)) for copies in {best_copies, 0}]
        )

    def _better(self, best: _Split, trials: Sequence[tuple[int, int]]) -> _Split:
        """Return the fastest of a split and some trials.

        Trials are computed in the order of their lower bounds, so most of them need no schedule.
        """
        for least_ns, copies, moved in sorted((self._least_ns(*trial), *trial) for trial in trials):
            if least_ns >= best.makespan_ns:
                break
            best = min(best, self.split(copies, moved), key=lambda split: split.makespan_ns)
        return best

    def _least_ns(self, copies: int, moved: int) -> float:
        """Return a lower bound of the end time: the work of each side, without any waiting."""
        copied, on_cpu, last = self.missing[:copies], self.missing[copies:], self.movable[len(self.movable) - moved :]
        cpu_ns = (
            sum(job.staging_ns for job in copied) + sum(job.cpu_ns for job in on_cpu) + sum(job.cpu_ns for job in last)
        )
        device_ns = self._resident_ns - sum(job.device_ns for job in last) + sum(job.device_ns for job in copied)
        has_work = self._residents - moved + copies > 0
        cpu_ns += self._latency.launch_ns * has_work
        device_ns += self._latency.layer_ns * has_work
        link_ns = sum(job.link_ns for job in copied)
        # The sums are in another order than in the schedule. A bound that is too high by rounding would hide the better
        # split.
        return max(cpu_ns, device_ns, link_ns) * (1 - 1e-12)

    def _split(self, copied: Set[int], moved: Set[int]) -> _Split:
        device_ns = sum(job.device_ns for load, job in self._ranked if load.is_resident and job.expert not in moved)
        has_work = self._residents - len(moved) + len(copied) > 0
        device_ns += self._latency.layer_ns * has_work
        begun_ns = self._latency.launch_ns * has_work
        waiting = [job for job in self.missing if job.expert in copied]
        on_cpu = [
            job
            for load, job in reversed(self._ranked)
            if (job.expert in moved if load.is_resident else job.expert not in copied)
        ]
        return _Split(frozenset(copied), frozenset(moved), *schedule(waiting, on_cpu, device_ns, begun_ns=begun_ns))

    def plan(self, split: _Split) -> LayerPlan:
        """Return the plan of a split."""
        actions = {}
        for load in self._loads:
            if load.is_resident and load.index not in split.moved:
                actions[load.index] = Action.RESIDENT
            else:
                actions[load.index] = Action.COPY if load.index in split.copied else Action.CPU
        return LayerPlan(actions, split.order, split.makespan_ns)


def _counts(most: int) -> list[int]:
    """Return about _MAX_TRIALS evenly spaced numbers from 0 to most, both included."""
    return [*range(0, most, -(-most // _MAX_TRIALS) or 1), most]
