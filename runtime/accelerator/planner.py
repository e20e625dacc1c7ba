"""Where each expert of a layer runs: a pure function of tokens, bytes and latencies.

An expert on the device runs there. For any other there is a choice: the processor computes it, or its weights are
copied and the device does. `published` is the rule of Twiddler (section 3.3, algorithm 1), expert by expert: copy where
cpu_lat(s) > gpu_lat(s) + transfer_lat(). It counts times as if one followed the other. Processor, link and device work
at the same time, copies wait for each other on the link and for a slot, so `auto` minimises when the layer is done: the
experts with the most tokens are copied, as many as bring that time to its least. `gpu` copies all (HOBBIT's GPU-centric
mode), `cpu` none (its cooperative mode).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
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
    """What a layer asks of one expert. index: among the stored experts; size_bytes: of its copy."""

    index: int
    tokens: int
    size_bytes: int
    is_resident: bool


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
    device_ns = sum(latency.device_ns(load.tokens) for load in loads if load.is_resident)
    actions = {load.index: Action.RESIDENT for load in loads if load.is_resident}
    best, best_ns, best_order = set[int](), float("inf"), tuple[int, ...]()
    for copied in _candidates(missing, latency, cooperation):
        order, makespan_ns = schedule(
            [load for load in missing if load.index in copied],
            [load for load in reversed(missing) if load.index not in copied],
            latency,
            device_ns,
            slots,
        )
        if makespan_ns < best_ns:
            best, best_ns, best_order = copied, makespan_ns, order
    actions |= {load.index: Action.COPY if load.index in best else Action.CPU for load in missing}
    return LayerPlan(actions, best_order, best_ns)


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
    step = -(-len(missing) // _MAX_TRIALS) or 1
    counts = [*range(0, len(missing), step), len(missing)]
    return [*({load.index for load in missing[:count]} for count in counts), published]


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
