"""A replay that splits the experts of a trace between the processor and a device of stated latencies.

The replay uses the planner of a run. The user states the latencies of the device. Those of the processor come from the
trace. Dense weights stay on the processor.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..accelerator.cooperative import CooperationCounts
from ..accelerator.device import COPY_SLOTS
from ..accelerator.latency import LatencyModel, fit_line
from ..accelerator.planner import Action, expert_loads, plan_layer
from ..options.runtime import Cooperation
from ..trace.trace import Trace


class DeviceClock:
    """The times of a device of given latencies, next to a processor. Nothing is computed.

    now_ns: time of the processor. The caller lets it pass while the processor computes.
    """

    def __init__(self, latency: LatencyModel) -> None:
        self._latency = latency
        self.now_ns = self._link_ns = self._device_ns = 0.0
        self._ends = deque[float](maxlen=COPY_SLOTS)

    def copy(self, size_bytes: int) -> float:
        """Begin to copy an expert, as soon as one of COPY_SLOTS is free. Return the time at which it arrives."""
        if len(self._ends) == COPY_SLOTS:
            self.now_ns = max(self.now_ns, self._ends.popleft())
        self.now_ns += self._latency.staging_ns(size_bytes)
        self._link_ns = max(self._link_ns, self.now_ns) + self._latency.link_ns(size_bytes)
        return self._link_ns

    def begin_layer(self) -> None:
        """Begin a layer that has work for the device."""
        self.now_ns += self._latency.launch_ns
        self._device_ns = max(self._device_ns, self.now_ns) + self._latency.device_layer_ns

    def compute(self, tokens: int, arrives_ns: float | None = None) -> None:
        """Begin to compute an expert for a number of tokens.

        arrives_ns: time at which its copy arrives; None: it stays on the device.
        """
        self._device_ns = max(self._device_ns, self.now_ns, arrives_ns or 0.0) + self._latency.device_ns(tokens)
        if arrives_ns is not None:
            self._ends.append(self._device_ns)

    def synchronize(self) -> None:
        """Let the processor wait for all copies and computations."""
        self.now_ns = max(self.now_ns, self._link_ns, self._device_ns)


@dataclass(frozen=True, slots=True)
class ReplayedDevice:
    """An accelerator during a replay.

    latency: latencies of device and processor.
    sizes: bytes of a copy of each stored expert.
    resident: experts that stay on the device.
    cooperation: rule by which experts are split.
    """

    latency: LatencyModel
    sizes: Sequence[int]
    resident: frozenset[int]
    cooperation: Cooperation


class ReplayedSplit:
    """The split of one layer, as LayerSplit in a run. All times are absolute, in ns.

    shared: the accelerator.
    tokens: number of tokens of each requested expert.
    is_in_host: returns whether the bytes of an expert are in host memory.

    counts: receives the decisions.
    now_ns: time at which the layer begins.

    host_experts: experts whose bytes are needed in host memory, in the order of requests.
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
        self._device = DeviceClock(shared.latency)
        self._device.now_ns = now_ns
        if any(action is not Action.CPU for action in plan.actions.values()):
            self._device.begin_layer()
        for index, action in plan.actions.items():
            if action is Action.RESIDENT:
                self._device.compute(tokens[index])
        self.host_experts = list(plan.order)
        counts.add(plan, loads)

    @property
    def comes_together(self) -> bool:
        return len(self._copied) <= COPY_SLOTS

    def take(self, experts: Sequence[int], now_ns: float) -> tuple[list[int], float]:
        """Begin the copies among experts whose bytes are in host memory.

        Returns the other experts, which the processor computes, and the time at which all copies have begun.
        """
        self._device.now_ns = now_ns
        for index in experts:
            if index in self._copied:
                self._device.compute(self._tokens[index], self._device.copy(self._sizes[index]))
        return [index for index in experts if index not in self._copied], self._device.now_ns

    def finish(self, now_ns: float) -> float:
        """Return the time at which processor and device have ended."""
        self._device.now_ns = now_ns
        self._device.synchronize()
        return self._device.now_ns


def traced_cpu_line(trace: Trace, scale: float = 1.0) -> tuple[float, float]:
    """Return the time of an expert on the recording machine: fixed ns and ns per token, both times a scale.

    A line is fitted to the passes, over the mean number of tokens per expert. If all passes have the same mean, the
    time per token is 0.
    """
    first, times = trace.header.first_expert, dict[float, list[float]]()
    for traced in trace.passes:
        requested = sum(len(experts) for _, experts in traced.accesses(first))
        if requested and sum(traced.experts_ns):
            mean_tokens = round(sum(len(chosen) for chosen in traced.chosen) / requested, 3)
            times.setdefault(mean_tokens, []).append(scale * sum(traced.experts_ns) / requested)
    medians = [statistics.median(expert_ns) for expert_ns in times.values()]
    if len(times) < 2:
        return (medians[0] if medians else 0.0), 0.0
    return fit_line(list(times), medians)  # type: ignore[arg-type]
