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

import math
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import Enum

from ..options import Cooperation
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


def plan_layer(
    loads: Sequence[ExpertLoad], latency: LatencyModel, cooperation: Cooperation, slots: int = COPY_SLOTS
) -> LayerPlan:
    """Decide for the experts of one layer; no expert twice. slots: copies on the device at once."""
    missing = sorted((load for load in loads if not load.is_resident), key=_copied_first)
    best = _Choice(loads, latency, slots)
    for copied in _candidates(missing, latency, cooperation):
        best = best.or_better(copied, set())
    if cooperation == "auto":
        movable = sorted((load for load in loads if load.is_in_host and load.is_resident), key=_copied_first)
        found = best.copied
        for count in _counts(len(movable)):
            moved = {load.index for load in movable[len(movable) - count :]}
            best = best.or_better(found, moved).or_better(set(), moved)
    return best.plan()


@dataclass(frozen=True, slots=True)
class _Choice:
    """The best split of a layer so far: what is copied, and which residents the processor computes."""

    loads: Sequence[ExpertLoad]
    latency: LatencyModel
    slots: int
    copied: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()
    order: tuple[int, ...] = ()
    makespan_ns: float = math.inf

    def or_better(self, copied: Set[int], moved: Set[int]) -> _Choice:
        """This choice, or another one if that ends earlier."""
        on_device = [load for load in self.loads if load.is_resident and load.index not in moved]
        others = (load for load in self.loads if not load.is_resident or load.index in moved)
        off_device = sorted(others, key=_copied_first)
        order, makespan_ns = schedule(
            [load for load in off_device if load.index in copied],
            [load for load in reversed(off_device) if load.index not in copied],
            self.latency,
            sum(self.latency.device_ns(load.tokens) for load in on_device),
            self.slots,
        )
        if makespan_ns >= self.makespan_ns:
            return self
        chosen = (frozenset(copied), frozenset(moved), order, makespan_ns)
        return _Choice(self.loads, self.latency, self.slots, *chosen)

    def plan(self) -> LayerPlan:
        """What it means for every expert."""
        actions = {}
        for load in self.loads:
            if load.is_resident and load.index not in self.moved:
                actions[load.index] = Action.RESIDENT
            else:
                actions[load.index] = Action.COPY if load.index in self.copied else Action.CPU
        return LayerPlan(actions, self.order, self.makespan_ns)


def _counts(most: int) -> list[int]:
    """Numbers from 0 to most, both there, at most _MAX_TRIALS of them between."""
    return [*range(0, most, -(-most // _MAX_TRIALS) or 1), most]


def _copied_first(load: ExpertLoad) -> tuple[int, int, int]:
    return -load.tokens, load.size_bytes, load.index


def _candidates(missing: Sequence[ExpertLoad], latency: LatencyModel, cooperation: Cooperation) -> list[set[int]]:
    """Sets of experts to copy, fewest first, so that of equal times the one with the fewest copies is taken."""
    if cooperation == "cpu":
        return [set()]
    if cooperation == "gpu":
        return [{load.index for load in missing}]
    published = {load.index for load in missing if pays_alone(load, latency)}
    if cooperation == "published":
        return [published]
    return [*({load.index for load in missing[:count]} for count in _counts(len(missing))), published]


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
    order, ends = list[int](), deque[float](maxlen=slots)
    cpu_ns = link_ns = 0.0
    waiting, own = deque(copies), deque(computed)
    while waiting or own:
        free_ns = ends[0] if len(ends) == slots else 0.0
        if waiting and (free_ns <= cpu_ns or not own):
            load = waiting.popleft()
            cpu_ns = max(cpu_ns, free_ns) + latency.staging_ns(load.size_bytes)
            link_ns = max(link_ns, cpu_ns) + latency.link_ns(load.size_bytes)
            device_ns = max(device_ns, link_ns) + latency.device_ns(load.tokens)
            ends.append(device_ns)
        else:
            load = own.popleft()
            cpu_ns += latency.cpu_ns(load.tokens)
        order.append(load.index)
    return tuple(order), max(cpu_ns, device_ns)
