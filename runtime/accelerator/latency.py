"""Measured times of an expert: computed on the CPU, computed on the device, and copied there.

Source: Twiddler, section 3.3: cpu_lat grows with the tokens, transfer_lat does not, gpu_lat is constant.
Here the device time may grow with the tokens as well, and a transfer has two parts.
First the CPU copies the expert into a staging buffer and computes nothing. Then the link moves it without the CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from .. import kernels
from .device import COPY_SLOTS, DeviceExpert, ExpertDevice
from .image import expert_bytes

SAMPLE_TOKENS = (1, 8, 32)
REPEATS = 3
_WARM_UPS = 3
"""Runs of a layer on a device that are not timed. They compile, then record, then replay."""


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Times of one expert in ns: a fixed part, and a part for each token or byte. None is negative.

    device_fixed_ns, device_token_ns: times of an expert that is on the device.
    launch_ns: time that the CPU needs to begin the device's work of a layer. It computes nothing then.
    device_layer_ns: further time of such a layer: to move its rows there and the results back.
    """

    cpu_fixed_ns: float
    cpu_token_ns: float
    device_fixed_ns: float
    device_token_ns: float
    staging_ns_per_byte: float
    link_ns_per_byte: float
    launch_ns: float = 0.0
    device_layer_ns: float = 0.0

    def cpu_ns(self, tokens: int) -> float:
        """Time of an expert on the CPU."""
        return self.cpu_fixed_ns + self.cpu_token_ns * tokens

    def device_ns(self, tokens: int) -> float:
        """Time of an expert on the device, once its weights are there."""
        return self.device_fixed_ns + self.device_token_ns * tokens

    @property
    def layer_ns(self) -> float:
        """Time before the device computes the first expert of a layer."""
        return self.launch_ns + self.device_layer_ns

    def staging_ns(self, size_bytes: int) -> float:
        """Time that a copy keeps the CPU busy."""
        return self.staging_ns_per_byte * size_bytes

    def link_ns(self, size_bytes: int) -> float:
        """Time of a copy on the link, after staging."""
        return self.link_ns_per_byte * size_bytes

    def transfer_ns(self, size_bytes: int) -> float:
        """Time of a single copy, from its start until it has arrived."""
        return self.staging_ns(size_bytes) + self.link_ns(size_bytes)

    def to_plain(self) -> dict[str, float]:
        return asdict(self)

    def to_text(self) -> str:
        """Return the times as text for the `mode:` line."""
        rate = self.staging_ns_per_byte + self.link_ns_per_byte
        link = f" (link {1 / self.link_ns_per_byte:.2f})" if self.link_ns_per_byte else ""
        copied = f"{1 / rate:.2f} GB/s{link}" if rate else "no time"
        begun = f"{self.launch_ns / 1e3:.0f} us to begin a layer, then {self.device_layer_ns / 1e3:.0f}"
        return (
            f"CPU {self.cpu_fixed_ns / 1e3:.0f} + {self.cpu_token_ns / 1e3:.1f} us a token, device {begun} + "
            f"{self.device_fixed_ns / 1e3:.0f} + {self.device_token_ns / 1e3:.1f} us a token, copies {copied}"
        )


def fit_line(tokens: Sequence[int], times_ns: Sequence[float]) -> tuple[float, float]:
    """Fit a + b * tokens with the least squared relative errors, neither a nor b negative.

    Errors are relative because decoding depends on the time of one token, which is small next to that of many.
    tokens: at least two values, not all equal.
    times_ns: positive.
    Raises ValueError otherwise.
    """
    s, t = np.asarray(tokens, np.float64), np.asarray(times_ns, np.float64)
    if len(s) != len(t) or len(np.unique(s)) < 2 or bool((t <= 0).any()):
        raise ValueError("a line needs positive times of two different counts of tokens")
    weight = 1 / t
    slope, fixed = np.polyfit(s, t, 1, w=weight)
    if slope < 0:
        return float((weight**2 * t).sum() / (weight**2).sum()), 0.0
    if fixed < 0:
        return 0.0, float((weight**2 * s * t).sum() / (weight**2 * s * s).sum())
    return float(fixed), float(slope)


def measure_latency(
    device: ExpertDevice,
    expert: kernels.Expert,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    run_on_cpu: Callable[..., None] = kernels.expert_ffn,
) -> LatencyModel:
    """Time an expert on both sides. Lines are fitted through medians of a few repeats.

    The bytes of the expert are in host memory. Every step runs before it is timed.
    run_on_cpu: takes the arguments of `kernels.expert_ffn`.
    """
    source, size = np.random.default_rng(0), expert_bytes(expert)
    cpu, on_device, launch, layer = list[float](), list[float](), list[float](), list[float]()
    staged_ns, arrived_ns = _time_copy(device, expert, clock_ns)
    for count in SAMPLE_TOKENS:
        rows = source.standard_normal((count, expert.up.columns), np.float32)
        parts = np.empty((count, 1, expert.down.rows), np.float32)
        at = (np.arange(count, dtype=np.int32), np.zeros(count, np.int32))
        compute = partial(run_on_cpu, expert, rows, *at, parts)
        cpu.append(median_ns(compute, clock_ns))
        (_, one_ns), (launched_ns, all_ns) = (
            _time_device(device, expert, rows, number, clock_ns) for number in (1, COPY_SLOTS)
        )
        on_device.append(max((all_ns - one_ns) / (COPY_SLOTS - 1), 1.0))
        launch.append(launched_ns)
        layer.append(max(one_ns - launched_ns - on_device[-1], 0.0))
    return LatencyModel(
        *fit_line(SAMPLE_TOKENS, cpu),
        *fit_line(SAMPLE_TOKENS, on_device),
        staging_ns_per_byte=staged_ns / size,
        link_ns_per_byte=arrived_ns / size,
        launch_ns=statistics.median(launch),
        device_layer_ns=statistics.median(layer),
    )


def mean_latency(latencies: Sequence[LatencyModel]) -> LatencyModel:
    """Return the mean of each constant over the latencies of several experts, at least one."""
    plain = [latency.to_plain() for latency in latencies]
    return LatencyModel(**{name: statistics.fmean(times[name] for times in plain) for name in plain[0]})


def median_ns(call: Callable[[], object], clock_ns: Callable[[], int]) -> float:
    """Return the median time of some calls, at least 1 ns. One more call runs first and is not timed."""
    call()
    times = []
    for _ in range(REPEATS):
        started_ns = clock_ns()
        call()
        times.append(clock_ns() - started_ns)
    return max(statistics.median(times), 1.0)  # a clock may stand still


def _time_copy(device: ExpertDevice, expert: kernels.Expert, clock_ns: Callable[[], int]) -> tuple[float, float]:
    """Return two medians: the time until the CPU is free again, and from then until the bytes have arrived."""
    staged, arrived = [], []
    for _ in range(REPEATS + 1):
        device.synchronize()
        started_ns = clock_ns()
        copied = device.copy(expert)
        free_ns = clock_ns()
        device.synchronize()
        staged.append(free_ns - started_ns)
        arrived.append(clock_ns() - free_ns)
        device.drop(copied)
    return statistics.median(staged[1:]), statistics.median(arrived[1:])


def _time_device(
    device: ExpertDevice,
    expert: kernels.Expert,
    rows: np.ndarray,
    number: int,
    clock_ns: Callable[[], int],
) -> tuple[float, float]:
    """Return two medians for a layer with some experts that have arrived: until all is begun, and until it is done.

    rows: float32 [n, D]; each expert has all of them.
    number: experts, at most COPY_SLOTS.
    """
    begun, done, count = list[int](), list[int](), len(rows)
    parts = np.empty((count, number, expert.down.rows), np.float32)
    tokens = np.arange(count, dtype=np.int32)
    for _ in range(REPEATS + _WARM_UPS):
        copied: list[DeviceExpert] = [device.copy(expert) for _ in range(number)]
        device.synchronize()
        started_ns = clock_ns()
        device.begin(rows)
        for rank, copy in enumerate(copied):
            device.run(copy, tokens, np.full_like(tokens, rank))
        device.launch()
        begun.append(clock_ns() - started_ns)
        device.collect(parts)
        done.append(clock_ns() - started_ns)
    return statistics.median(begun[_WARM_UPS:]), max(statistics.median(done[_WARM_UPS:]), 1.0)
