"""The device of `moec simulate`: rates of its storage and processor, and an accelerator."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moec.manifests.errors import InputError, MemoryBudgetExceeded, OptionError
from moec.manifests.runtime_limits import MAX_READERS
from moec.manifests.sizes import parse_bytes

if TYPE_CHECKING:
    from moec.profiles.device import DeviceProfile
    from moec.profiles.device_parts import Gpu
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.options.runtime import Cooperation
    from moec.runtime.simulation.accelerator_replay import ReplayedDevice
    from moec.runtime.simulation.timeline import DeviceRates
    from moec.runtime.trace.trace import Trace, TraceHeader

_STAGED_BYTES = 2
"""The processor reads and writes each byte of a copy."""


@dataclass(frozen=True, slots=True)
class AcceleratorRates:
    """Stated rates of an accelerator. expert_ns, token_ns: time of an expert, fixed and per token."""

    memory_bytes: int
    expert_ns: int
    token_ns: int
    link_bytes_per_s: int


def device_rates(
    header: TraceHeader, profile: DeviceProfile | None, readers: int, read_rate: str | None, read_latency: str | None
) -> DeviceRates:
    """Return the rates of a device profile, or those of the recording machine without one.

    read_rate, read_latency: texts that override the rates of storage; None: not given.
    Raises OptionError, and InputError for a trace without rates.
    """
    from moec.runtime.simulation.timeline import DeviceRates

    if not 1 <= readers <= MAX_READERS:
        raise OptionError(f"readers must be 1 to {MAX_READERS}, found {readers}", "leave it out for 2")
    if not header.has_rates:
        raise InputError(
            "the trace has no rates of its machine, because `moec run` measures none",
            "record one with `moec bench BUNDLE --trace-out FILE`",
        )
    source = header if profile is None else profile
    rates = DeviceRates(
        storage_bytes_per_s=source.storage_bytes_per_s,
        storage_latency_ns=source.storage_latency_ns,
        readers=readers,
        compute_scale=header.memory_bytes_per_s / source.memory_bytes_per_s,
    )
    if read_rate is not None:
        rate = parse_bytes(read_rate)
        if rate < 1:
            raise OptionError("`--read-rate` must be at least 1 byte per second", "write it like `90MB`")
        rates = replace(rates, storage_bytes_per_s=rate)
    return rates if read_latency is None else replace(rates, storage_latency_ns=parse_time_ns(read_latency))


def parse_time_ns(text: str) -> int:
    """Return the nanoseconds of a text like `150us`, `8ms` or `0s`. Raises OptionError."""
    units = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ns|us|ms|s)\s*", text)
    if match is None:
        raise OptionError(f"`{text[:60]}` is not a time", "write it like `150us` or `8ms`")
    return round(float(match[1]) * units[match[2]])


def parse_accelerator(text: str, gpu: Gpu | None = None) -> AcceleratorRates:
    """Parse `memory=8GiB,expert=600us,token=2us,link=12GB`. `token` is optional, 0 by default. Raises OptionError.

    gpu: GPU of the device profile, which states `memory` and `link` if the text does not; None without one.
    """
    remedy = "write it like `memory=8GiB,expert=600us,token=2us,link=12GB`"
    given: dict[str, str] = {}
    for entry in text.split(","):
        name, sign, value = entry.strip().partition("=")
        if not sign or name not in ("memory", "expert", "token", "link") or name in given:
            raise OptionError(
                f"`--accelerator {text[:60]}`: `{entry[:30]}` is not one of memory, expert, token, link", remedy
            )
        given[name] = value.strip()
    if gpu is not None:
        given = {"memory": str(gpu.memory_bytes)} | given
    if gpu is not None and gpu.link_bytes_per_s is not None:
        given = {"link": str(gpu.link_bytes_per_s)} | given
    missing = [name for name in ("memory", "expert", "link") if name not in given]
    if missing:
        raise OptionError(f"`--accelerator {text[:60]}` does not say {', '.join(missing)}", remedy)
    try:
        rates = AcceleratorRates(
            memory_bytes=parse_bytes(given["memory"]),
            expert_ns=parse_time_ns(given["expert"]),
            token_ns=parse_time_ns(given.get("token", "0s")),
            link_bytes_per_s=parse_bytes(given["link"]),
        )
    except OptionError as error:
        raise OptionError(f"`--accelerator {text[:60]}`: {error.message}", remedy) from error
    if rates.link_bytes_per_s < 1:
        raise OptionError("`--accelerator`: the link must carry at least 1 byte per second", remedy)
    return rates


def shared_device(
    bundle: Bundle, trace: Trace, device: DeviceRates, rates: AcceleratorRates, cooperation: Cooperation
) -> ReplayedDevice:
    """Return the accelerator that holds the most popular experts of a bundle.

    Raises MemoryBudgetExceeded if its memory is under its floor.
    """
    import numpy as np

    from moec.profiles.memory_floor import longest_pass
    from moec.runtime.accelerator.image import entry_bytes
    from moec.runtime.accelerator.latency import LatencyModel
    from moec.runtime.accelerator.placement import LIBRARY_BYTES, place_experts, working_bytes
    from moec.runtime.expert_cache.records import bundle_records
    from moec.runtime.simulation.accelerator_replay import ReplayedDevice, traced_cpu_line

    manifest, header = bundle.manifest, trace.header
    sizes = tuple(entry_bytes(manifest.model, entry) for entry in manifest.stored_experts)
    frequency = bundle_records(bundle, bundle.tables(), manifest.experts).frequency
    order = [index for index in np.argsort(-frequency, kind="stable").tolist() if sizes[index]]
    passed = longest_pass(manifest.model, 1, manifest.model.default_context)
    working = working_bytes(manifest, passed, may_group=True) + LIBRARY_BYTES
    try:
        placement = place_experts(sizes, order, rates.memory_bytes, working, 0)
    except MemoryBudgetExceeded as error:
        raise MemoryBudgetExceeded(error.message, "raise `memory` of `--accelerator`") from error
    memory_bytes_per_s = header.memory_bytes_per_s / device.compute_scale
    latency = LatencyModel(
        *traced_cpu_line(trace, device.compute_scale),
        device_fixed_ns=rates.expert_ns,
        device_token_ns=rates.token_ns,
        staging_ns_per_byte=_STAGED_BYTES * 1e9 / memory_bytes_per_s,
        link_ns_per_byte=1e9 / rates.link_bytes_per_s,
    )
    return ReplayedDevice(latency, sizes, frozenset(placement.resident), cooperation)
