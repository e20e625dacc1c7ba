"""The experts of a replayed trace shared with a device that is not there: the planner's split on a simulated clock.

The device's latencies are stated, the processor's come from the trace. Dense weights stay on the processor.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..accelerator.cooperative import CooperationCounts
from ..accelerator.device import COPY_SLOTS
from ..accelerator.latency import LatencyModel, fit_line
from ..accelerator.planner import Action, expert_loads, plan_layer
from ..options.runtime import Cooperation
from ..trace.trace import Trace
from .accelerator_device import SimulatedDevice


@dataclass(frozen=True, slots=True)
class ReplayedDevice:
    """sizes: bytes of a copy of every stored expert; resident: those that stay on the device."""

    latency: LatencyModel
    sizes: Sequence[int]
    resident: frozenset[int]
    cooperation: Cooperation


class ReplayedSplit:
    """One layer under way, as LayerSplit in a run. wanted: experts that need their host bytes, in the order to ask.

    tokens: of each expert that the layer asks for. is_in_host: whether its bytes are there. All times are absolute, ns.
    """

    def __init__(
        self,
        shared: ReplayedDevice,
        tokens: Mapping[int, int],
        is_in_host: Callable[[int], bool],
        counts: CooperationCounts,
        now_ns: float,
    ) -> None:
        loads = expert_loads(tokens, shared.sizes, shared.resident, is_in_host)
        plan = plan_layer(loads, shared.latency, shared.cooperation)
        self._tokens, self._sizes = tokens, shared.sizes
        self._copied = {index for index, action in plan.actions.items() if action is Action.COPY}
        self._device = SimulatedDevice(shared.latency, memory_bytes=1 << 62)
        self._device.now_ns = now_ns
        kept = self._device.keep_bytes(0)
        for index, action in plan.actions.items():
            if action is Action.RESIDENT:
                self._device.run_tokens(kept, tokens[index])
        self.wanted = list(plan.order)
        counts.add(plan, loads)

    @property
    def comes_together(self) -> bool:
        """Whether experts may be taken all at once, as in LayerSplit."""
        return len(self._copied) <= COPY_SLOTS

    def take(self, experts: Sequence[int], now_ns: float) -> tuple[list[int], float]:
        """Experts whose host bytes are there: those that the processor computes, and when it has begun the copies."""
        self._device.now_ns = now_ns
        for index in experts:
            if index in self._copied:
                self._device.run_tokens(self._device.copy_bytes(self._sizes[index]), self._tokens[index])
        return [index for index in experts if index not in self._copied], self._device.now_ns

    def finish(self, now_ns: float) -> float:
        """When the device has ended too."""
        self._device.now_ns = now_ns
        self._device.synchronize()
        return self._device.now_ns


def traced_cpu_line(trace: Trace, scale: float = 1.0) -> tuple[float, float]:
    """What an expert took where the trace was recorded: fixed ns and ns per token, times a scale.

    A line through the passes, by the mean tokens of an expert in each; of a trace with passes of one length the fixed
    part alone.
    """
    first, times = trace.header.first_expert, dict[float, list[float]]()
    for each in trace.passes:
        asked = sum(len(experts) for _, experts in each.accesses(first))
        if asked and sum(each.experts_ns):
            mean_tokens = round(sum(len(chosen) for chosen in each.chosen) / asked, 3)
            times.setdefault(mean_tokens, []).append(scale * sum(each.experts_ns) / asked)
    medians = [statistics.median(found) for found in times.values()]
    if len(times) < 2:
        return (medians[0] if medians else 0.0), 0.0
    return fit_line(list(times), medians)  # type: ignore[arg-type]
