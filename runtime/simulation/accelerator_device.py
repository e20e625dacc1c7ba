"""A device that is not there: it has a clock, latencies and a memory of its own, and computes with the CPU's kernels.

Its results are the CPU's bit for bit, so a run on it shows that splitting and bringing together change nothing; its
clock tells what a schedule takes on a device of these latencies.
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
    """An expert on the device. expert: None where only time passes. ready_ns: when it has arrived."""

    expert: kernels.Expert | None
    ready_ns: float
    is_copy: bool


def _own(expert: kernels.Expert) -> kernels.Expert:
    """The expert over bytes of its own."""
    gate, up, down = (
        None if matrix is None else kernels.PackedMatrix(matrix.data.copy(), matrix.rows, matrix.columns, matrix.spec)
        for matrix in (expert.gate, expert.up, expert.down)
    )
    if up is None or down is None:
        raise ValueError("an expert has up and down")
    return kernels.Expert(gate, up, down, expert.activation, expert.limit, expert.biases)


class SimulatedDevice:
    """A device of these latencies and so many bytes. now_ns: the processor's time, which `advance` lets pass."""

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
        """Residents, and the slots of copies."""
        return self._kept_bytes + self._slots * self._largest_copy

    def clock_ns(self) -> int:
        """The processor's time, for `measure_latency`."""
        return round(self.now_ns)

    def advance(self, elapsed_ns: float) -> None:
        """The processor computes something."""
        self.now_ns += elapsed_ns

    def keep(self, expert: kernels.Expert) -> SimulatedExpert:
        """Upload an expert that stays. Raises MemoryBudgetExceeded."""
        return self.keep_bytes(expert_bytes(expert), _own(expert))

    def keep_bytes(self, size_bytes: int, expert: kernels.Expert | None = None) -> SimulatedExpert:
        """As `keep`, of an expert of which only the size is known."""
        self._kept_bytes += size_bytes
        self._check()
        return SimulatedExpert(expert, 0.0, is_copy=False)

    def copy(self, expert: kernels.Expert) -> SimulatedExpert:
        """Begin to copy an expert. Raises MemoryBudgetExceeded."""
        return self.copy_bytes(expert_bytes(expert), _own(expert))

    def copy_bytes(self, size_bytes: int, expert: kernels.Expert | None = None) -> SimulatedExpert:
        """As `copy`, of an expert of which only the size is known."""
        self._largest_copy = max(self._largest_copy, size_bytes)
        self._check()
        if len(self._ends) == self._slots:
            self.now_ns = max(self.now_ns, self._ends.popleft())
        self.now_ns += self._latency.staging_ns(size_bytes)
        self._link_ns = max(self._link_ns, self.now_ns) + self._latency.link_ns(size_bytes)
        return SimulatedExpert(expert, self._link_ns, is_copy=True)

    def drop(self, expert: SimulatedExpert) -> None:
        """Nothing is held for it."""

    def begin(self, hidden_states: np.ndarray) -> None:
        """Take the rows of a layer, float32 [T, D]."""
        self._rows, self._results = hidden_states, []

    def run(self, expert: SimulatedExpert, tokens: np.ndarray, ranks: np.ndarray) -> None:
        """Begin to compute an expert."""
        self.run_tokens(expert, len(tokens))
        self._results.append((expert, tokens, ranks))

    def run_tokens(self, expert: SimulatedExpert, tokens: int) -> None:
        """As `run`, of so many tokens of which nothing else is known."""
        begun_ns = max(self._device_ns, self.now_ns, expert.ready_ns)
        self._device_ns = begun_ns + self._latency.device_ns(tokens)
        if expert.is_copy:
            self._ends.append(self._device_ns)

    def collect(self, parts: np.ndarray) -> None:
        """Wait, and write results to their places in float32 [T, K, D]."""
        self.synchronize()
        for expert, tokens, ranks in self._results:
            kernels.expert_ffn(expert.expert, self._rows, tokens, ranks, parts)  # type: ignore[arg-type]
        self._results = []

    def synchronize(self) -> None:
        """Wait for everything that was begun."""
        self.now_ns = max(self.now_ns, self._link_ns, self._device_ns)

    def close(self) -> None:
        """Give the memory back."""
        self._kept_bytes, self._largest_copy = 0, 0

    def _check(self) -> None:
        if self.used_bytes > self._memory_bytes:
            raise MemoryBudgetExceeded(
                f"the simulated device has {self._memory_bytes} bytes, {self.used_bytes} are needed", "place less"
            )
