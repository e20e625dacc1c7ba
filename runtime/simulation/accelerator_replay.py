"""A simulated device, and a replay that splits the experts of a trace between the processor and it.

The device has a clock, latencies and a memory of its own, and computes with the CPU's kernels. Its results are
bit-equal to those of the CPU. So a run on it shows that splitting a layer and merging the results change nothing. Its
clock shows the time of a schedule on a device of these latencies.

The replay uses the planner of a run. The user states the latencies of the device. Those of the processor come from the
trace. Dense weights stay on the processor.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moec.manifests.errors import MemoryBudgetExceeded

from .. import kernels
from ..accelerator.cooperative import CooperationCounts
from ..accelerator.device import COPY_SLOTS
from ..accelerator.image import expert_bytes
from ..accelerator.latency import LatencyModel, fit_line
from ..accelerator.planner import Action, expert_loads, plan_layer
from ..options.runtime import Cooperation
from ..trace.trace import Trace


@dataclass(slots=True, eq=False)
class SimulatedExpert:
    """An expert on the device.

    expert: its kernels; None if only time is simulated.
    ready_ns: time at which it has arrived.
    is_copy: whether it leaves the device after use.
    """

    expert: kernels.Expert | None
    ready_ns: float
    is_copy: bool


def _own(expert: kernels.Expert) -> kernels.Expert:
    """Return the expert over a copy of its bytes."""
    gate, up, down = (
        None if matrix is None else kernels.PackedMatrix(matrix.data.copy(), matrix.rows, matrix.columns, matrix.spec)
        for matrix in (expert.gate, expert.up, expert.down)
    )
    if up is None or down is None:
        raise ValueError("an expert has up and down")
    return kernels.Expert(gate, up, down, expert.activation, expert.limit, expert.biases)


class SimulatedDevice:
    """A device of given latencies and memory.


    now_ns: time of the processor. `advance` lets it pass.
    """

    name, host_bytes, counts_all = "simulated", 0, False

    def __init__(self, latency: LatencyModel, memory_bytes: int) -> None:
        self._latency, self._memory_bytes = latency, memory_bytes
        self.now_ns = self._link_ns = self._device_ns = 0.0
        self._kept_bytes, self._largest_copy = 0, 0
        self._ends = deque[float](maxlen=COPY_SLOTS)
        self._rows: np.ndarray | None = None
        self._results: list[tuple[SimulatedExpert, np.ndarray, np.ndarray]] = []

    @property
    def used_bytes(self) -> int:
        """Bytes of resident experts and of the slots for copies."""
        return self._kept_bytes + COPY_SLOTS * self._largest_copy

    def clock_ns(self) -> int:
        """Return the time of the processor, for `measure_latency`."""
        return round(self.now_ns)

    def advance(self, elapsed_ns: float) -> None:
        """Let the time of a computation on the processor pass."""
        self.now_ns += elapsed_ns

    def keep(self, expert: kernels.Expert) -> SimulatedExpert:
        """Upload an expert that stays. Raises MemoryBudgetExceeded."""
        return self.keep_bytes(expert_bytes(expert), _own(expert))

    def keep_bytes(self, size_bytes: int, expert: kernels.Expert | None = None) -> SimulatedExpert:
        """Upload an expert of which only the size is known. Raises MemoryBudgetExceeded."""
        self._kept_bytes += size_bytes
        self._check()
        return SimulatedExpert(expert, 0.0, is_copy=False)

    def copy(self, expert: kernels.Expert) -> SimulatedExpert:
        """Begin to copy an expert. Raises MemoryBudgetExceeded."""
        return self.copy_bytes(expert_bytes(expert), _own(expert))

    def copy_bytes(self, size_bytes: int, expert: kernels.Expert | None = None) -> SimulatedExpert:
        """Begin to copy an expert of which only the size is known. Raises MemoryBudgetExceeded."""
        self._largest_copy = max(self._largest_copy, size_bytes)
        self._check()
        if len(self._ends) == COPY_SLOTS:
            self.now_ns = max(self.now_ns, self._ends.popleft())
        self.now_ns += self._latency.staging_ns(size_bytes)
        self._link_ns = max(self._link_ns, self.now_ns) + self._latency.link_ns(size_bytes)
        return SimulatedExpert(expert, self._link_ns, is_copy=True)

    def drop(self, expert: SimulatedExpert) -> None:
        """Do nothing. An expert has no resources to free."""

    def begin(self, hidden_states: np.ndarray) -> None:
        self._rows, self._results = hidden_states, []
        self.begin_layer()

    def begin_layer(self) -> None:
        """Begin a layer of which only the times are known. It has work for the device."""
        self.now_ns += self._latency.launch_ns
        self._device_ns = max(self._device_ns, self.now_ns) + self._latency.device_layer_ns

    def run(self, expert: SimulatedExpert, tokens: np.ndarray, ranks: np.ndarray) -> None:
        self.run_tokens(expert, len(tokens))
        self._results.append((expert, tokens, ranks))

    def launch(self) -> None:
        """Do nothing: `run` has begun all experts."""

    def run_tokens(self, expert: SimulatedExpert, tokens: int) -> None:
        """Begin to compute an expert for a number of tokens."""
        begun_ns = max(self._device_ns, self.now_ns, expert.ready_ns)
        self._device_ns = begun_ns + self._latency.device_ns(tokens)
        if expert.is_copy:
            self._ends.append(self._device_ns)

    def collect(self, parts: np.ndarray) -> None:
        self.synchronize()
        for expert, tokens, ranks in self._results:
            kernels.expert_ffn(expert.expert, self._rows, tokens, ranks, parts)  # type: ignore[arg-type]
        self._results = []

    def synchronize(self) -> None:
        self.now_ns = max(self.now_ns, self._link_ns, self._device_ns)

    def close(self) -> None:
        self._kept_bytes, self._largest_copy = 0, 0

    def _check(self) -> None:
        if self.used_bytes > self._memory_bytes:
            raise MemoryBudgetExceeded(
                f"the simulated device has {self._memory_bytes} bytes, {self.used_bytes} are needed", "place less"
            )


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
        self._device = SimulatedDevice(shared.latency, memory_bytes=1 << 62)
        self._device.now_ns = now_ns
        if any(action is not Action.CPU for action in plan.actions.values()):
            self._device.begin_layer()
        resident = self._device.keep_bytes(0)
        for index, action in plan.actions.items():
            if action is Action.RESIDENT:
                self._device.run_tokens(resident, tokens[index])
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
                self._device.run_tokens(self._device.copy_bytes(self._sizes[index]), self._tokens[index])
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
