"""A simulated device. It has a clock, latencies and a memory of its own, and computes with the CPU's kernels.

Its results are bit-equal to those of the CPU. So a run on it shows that splitting a layer and merging the results
change nothing. Its clock shows the time of a schedule on a device of these latencies.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from moec.manifests.errors import MemoryBudgetExceeded

from .. import kernels
from ..accelerator.device import COPY_SLOTS
from ..accelerator.image import expert_bytes
from ..accelerator.latency import LatencyModel


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

    slots: number of copies that it can hold at once.

    now_ns: time of the processor. `advance` lets it pass.
    """

    name, host_bytes, counts_all = "simulated", 0, False

    def __init__(self, latency: LatencyModel, memory_bytes: int, slots: int = COPY_SLOTS) -> None:
        self._latency, self._memory_bytes, self._slots = latency, memory_bytes, slots
        self.now_ns = self._link_ns = self._device_ns = 0.0
        self._kept_bytes, self._largest_copy = 0, 0
        self._ends = deque[float](maxlen=slots)
        self._rows: np.ndarray | None = None
        self._results: list[tuple[SimulatedExpert, np.ndarray, np.ndarray]] = []

    @property
    def used_bytes(self) -> int:
        """Bytes of resident experts and of the slots for copies."""
        return self._kept_bytes + self._slots * self._largest_copy

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
        if len(self._ends) == self._slots:
            self.now_ns = max(self.now_ns, self._ends.popleft())
        self.now_ns += self._latency.staging_ns(size_bytes)
        self._link_ns = max(self._link_ns, self.now_ns) + self._latency.link_ns(size_bytes)
        return SimulatedExpert(expert, self._link_ns, is_copy=True)

    def drop(self, expert: SimulatedExpert) -> None:
        """Do nothing. An expert has no resources to free."""

    def begin(self, hidden_states: np.ndarray) -> None:
        """Begin a layer. hidden_states: float32 [T, D]."""
        self._rows, self._results = hidden_states, []
        self.begin_layer()

    def begin_layer(self) -> None:
        """Begin a layer of which only the times are known. It has work for the device."""
        self.now_ns += self._latency.launch_ns
        self._device_ns = max(self._device_ns, self.now_ns) + self._latency.device_layer_ns

    def run(self, expert: SimulatedExpert, tokens: np.ndarray, ranks: np.ndarray) -> None:
        """Begin to compute an expert."""
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
        """Wait, and write the results into parts, float32 [T, K, D]."""
        self.synchronize()
        for expert, tokens, ranks in self._results:
            kernels.expert_ffn(expert.expert, self._rows, tokens, ranks, parts)  # type: ignore[arg-type]
        self._results = []

    def synchronize(self) -> None:
        """Wait for all copies and computations."""
        self.now_ns = max(self.now_ns, self._link_ns, self._device_ns)

    def close(self) -> None:
        """Free the memory."""
        self._kept_bytes, self._largest_copy = 0, 0

    def _check(self) -> None:
        if self.used_bytes > self._memory_bytes:
            raise MemoryBudgetExceeded(
                f"the simulated device has {self._memory_bytes} bytes, {self.used_bytes} are needed", "place less"
            )
