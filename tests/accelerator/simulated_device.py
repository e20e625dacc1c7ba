"""A device that takes the times of a `DeviceClock` and computes with the kernels of the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moec.runtime import kernels
from moec.runtime.accelerator.image import expert_bytes
from moec.runtime.accelerator.latency import LatencyModel
from moec.runtime.simulation.accelerator_replay import DeviceClock


@dataclass(slots=True, eq=False)
class SimulatedExpert:
    """An expert over a copy of its bytes. arrives_ns: time at which its copy arrives; None: it stays."""

    expert: kernels.Expert
    arrives_ns: float | None


def copied(expert: kernels.Expert) -> kernels.Expert:
    gate, up, down = (
        None if matrix is None else kernels.PackedMatrix(matrix.data.copy(), matrix.rows, matrix.columns, matrix.spec)
        for matrix in (expert.gate, expert.up, expert.down)
    )
    assert up is not None and down is not None
    return kernels.Expert(gate, up, down, expert.activation, expert.limit, expert.biases)


class SimulatedDevice:
    """An ExpertDevice."""

    name, host_bytes, counts_all, used_bytes = "simulated", 0, False, 0

    def __init__(self, latency: LatencyModel) -> None:
        self.clock = DeviceClock(latency)
        self._rows = np.empty((0, 0), np.float32)
        self._results: list[tuple[SimulatedExpert, np.ndarray, np.ndarray]] = []

    def keep(self, expert: kernels.Expert) -> SimulatedExpert:
        return SimulatedExpert(copied(expert), None)

    def copy(self, expert: kernels.Expert) -> SimulatedExpert:
        return SimulatedExpert(copied(expert), self.clock.copy(expert_bytes(expert)))

    def drop(self, expert: SimulatedExpert) -> None: ...

    def begin(self, hidden_states: np.ndarray) -> None:
        self._rows, self._results = hidden_states, []
        self.clock.begin_layer()

    def run(self, expert: SimulatedExpert, tokens: np.ndarray, ranks: np.ndarray) -> None:
        self.clock.compute(len(tokens), expert.arrives_ns)
        self._results.append((expert, tokens, ranks))

    def launch(self) -> None: ...

    def collect(self, parts: np.ndarray) -> None:
        self.clock.synchronize()
        for result, tokens, ranks in self._results:
            kernels.expert_ffn(result.expert, self._rows, tokens, ranks, parts)
        self._results = []

    def synchronize(self) -> None:
        self.clock.synchronize()

    def close(self) -> None: ...
