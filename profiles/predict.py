"""Predictions of a profile for a bundle: speed, cache size, refusal, objective. Pure functions.

Model: storage reads missing experts while the processor computes, so a token takes the longer of the two times.
Compute bytes are the bytes that one token's arithmetic touches in memory: dense weights and the chosen experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from moec.manifests.errors import DoesNotFit
from moec.manifests.sizes import option_bytes

from .device import DeviceProfile
from .device_parts import Power
from .memory_floor import FixedMemory

Objective = Literal["tpot", "bytes-per-token", "size"]
# 8-bit and 2-bit experts differ by a factor of 4. Above it, storage is the bottleneck for every choice of formats.
STORAGE_BOUND_RATIO = 4
_NS_PER_S = 10**9


def compute_ns(profile: DeviceProfile, compute_bytes_per_token: int) -> int:
    """Return the time to move one token's weights through the processor, rounded up."""
    return _time_ns(compute_bytes_per_token, profile.memory_bytes_per_s)


def storage_ns(profile: DeviceProfile, missed_bytes_per_token: float, reads_per_token: float) -> int:
    """Return the time to read one token's missing experts one after the other, rounded up."""
    latency = math.ceil(reads_per_token * profile.storage_latency_ns)
    return _time_ns(missed_bytes_per_token, profile.storage_bytes_per_s) + latency


def _time_ns(size_bytes: float, bytes_per_s: int) -> int:
    return math.ceil(size_bytes * _NS_PER_S / bytes_per_s)


def predicted_tpot_ns(
    profile: DeviceProfile, compute_bytes_per_token: int, missed_bytes_per_token: float, reads_per_token: float
) -> int:
    """Return the time per output token: max(compute, missed bytes / storage bandwidth + latency of each read)."""
    return max(
        compute_ns(profile, compute_bytes_per_token), storage_ns(profile, missed_bytes_per_token, reads_per_token)
    )


def predicted_joules(power: Power, elapsed_ns: float, stall: float, uses_gpu: bool) -> float | None:
    """Return the energy of an elapsed time by the stated draw: that under load, and that without work while stalled.

    A draw without work that is not stated counts as the one under load. A GPU counts as busy all the time.
    stall: share of the time in which the processor waits.
    Returns None if the profile does not state a draw that is needed.
    """
    if power.load_watts is None or (uses_gpu and power.gpu_watts is None):
        return None
    idle_watts = power.load_watts if power.idle_watts is None else power.idle_watts
    watts = (1 - stall) * power.load_watts + stall * idle_watts
    if uses_gpu and power.gpu_watts is not None:
        watts += power.gpu_watts
    return watts * elapsed_ns / _NS_PER_S


def expected_misses(experts: Iterable[tuple[int, float]], cache_bytes: int) -> tuple[float, float]:
    """Return (missed bytes per token, reads per token) of a cache that holds the most read experts and keeps them.

    An expert that does not fit is skipped; smaller ones after it may still be cached. Ties keep the given order.
    experts: (padded bytes, reads per token) of each routed expert.
    """
    free_bytes, missed_bytes, reads = cache_bytes, 0.0, 0.0
    for size_bytes, reads_per_token in sorted(experts, key=lambda item: -item[1]):
        if size_bytes <= free_bytes:
            free_bytes -= size_bytes
        else:
            missed_bytes += size_bytes * reads_per_token
            reads += reads_per_token
    return missed_bytes, reads


def recommended_cache_bytes(profile: DeviceProfile, fixed: FixedMemory, total_expert_bytes: int) -> int:
    """Return the bytes that the budget leaves for experts, at most all of them.

    fixed: all other memory of a run with default options.
    Raises DoesNotFit with the floor if the budget is below it.
    """
    if fixed.floor_bytes > profile.memory_budget_bytes:
        parts = {
            "the process": fixed.process_bytes,
            "dense weights": fixed.dense_bytes,
            "context": fixed.kv_bytes,
            "one pass": fixed.scratch_bytes,
            "one layer's experts": fixed.minimum_expert_bytes,
        }
        raise DoesNotFit(
            f"device `{profile.name}` has a memory budget of {profile.memory_budget_bytes} bytes, this model needs "
            f"{fixed.floor_bytes} ({option_bytes(fixed.floor_bytes)}: "
            f"{', '.join(f'{name} {option_bytes(size)}' for name, size in parts.items())})",
            "ask for fewer bits, fewer `--dense-bits`, or a device with more memory",
        )
    return min(total_expert_bytes, profile.memory_budget_bytes - fixed.fixed_bytes)


def default_objective(
    profile: DeviceProfile, compute_bytes_per_token: int, missed_bytes_per_token: float, reads_per_token: float
) -> Objective:
    """Return the default objective of the search. The arguments describe the model with all experts at 8 bits.

    `size`: no expert is missed, so storage never limits the speed. `bytes-per-token`: storage takes more than
        STORAGE_BOUND_RATIO times as long as compute. Then it limits the speed at every bitwidth, and its bytes rank
        plans as the speed does.
    `tpot`: all other cases.
    A probed profile uses its rounded numbers.
    """
    if missed_bytes_per_token <= 0:
        return "size"
    steady = profile.rounded()
    reading_ns = storage_ns(steady, missed_bytes_per_token, reads_per_token)
    if reading_ns > STORAGE_BOUND_RATIO * compute_ns(steady, compute_bytes_per_token):
        return "bytes-per-token"
    return "tpot"
