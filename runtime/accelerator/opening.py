"""From options to cooperating experts: the device is found, some experts are timed on both, the popular ones stay.

Two steps, because what torch takes of the host's memory must be known before the budget is split, and experts are there
only after. torch is imported here and nowhere earlier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moec.manifests.bundle import BundleManifest
from moec.manifests.errors import AcceleratorUnavailable, MissingDependency, OptionError
from moec.manifests.sizes import parse_bytes
from moec.profiles.memory_floor import longest_pass

from .. import kernels
from ..expert_cache.eviction import ExpertRecords
from ..memory.budget import chosen_context
from ..options.runtime import TORCH_CPU, RuntimeOptions
from ..storage.interface import ExpertStorage
from .cooperative import CooperativeExperts
from .dense import AttentionSide, DenseLatency, DenseOnDevice, dense_bytes, measure_dense, shared_bytes
from .device import COPY_SLOTS, DeviceExpert, ExpertDevice
from .image import entry_bytes
from .latency import LatencyModel, mean_latency, measure_latency
from .placement import LIBRARY_BYTES, Placement, place_experts, working_bytes

if TYPE_CHECKING:
    import torch

    from ..layers.kv_cache import KVCache
    from ..model.forward import Model

_SAMPLES = 3
"""Experts that are timed: the smallest, the median and the largest."""


@dataclass(frozen=True, slots=True)
class OpenedAccelerator:
    """A device that was found. memory_bytes: its budget; host_bytes: what it takes of this process's memory.

    dense_bytes: what dense weights would take of the budget; 0: they stay on the CPU. dense_note: why, for people.
    """

    name: str
    device: torch.device
    memory_bytes: int
    host_bytes: int
    sizes: tuple[int, ...]
    working_bytes: int
    dense_bytes: int
    dense_note: str


def open_device(manifest: BundleManifest, options: RuntimeOptions, name: str) -> OpenedAccelerator:
    """The accelerator of that name, its context created. Call before the budget is split.

    Raises MissingDependency without torch, AcceleratorUnavailable, MemoryBudgetExceeded with the device's floor.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"`--accelerator {name}` needs the package `torch`, which is not installed",
            'pip install "moec[cuda]"',
        ) from error
    is_cpu = name == TORCH_CPU
    device = torch.device("cpu") if is_cpu else _cuda(name)
    given = None if options.accelerator_memory is None else parse_bytes(options.accelerator_memory)
    if not is_cpu:
        torch.zeros(1, device=device)  # the driver's share of this process's memory is there from now on
        torch.cuda.reset_peak_memory_stats(device)  # what is told is the peak from here on
        free = torch.cuda.mem_get_info(device)[0]
        if given is not None and given > free:
            raise AcceleratorUnavailable(
                f"`--accelerator-memory {options.accelerator_memory}` is {given} bytes, `{name}` has {free} free",
                "ask for less, or leave it out for 7/8 of what is free",
            )
        given = free * 7 // 8 if given is None else given
    memory_bytes = given or 0
    sizes = tuple(entry_bytes(manifest.model, entry) for entry in manifest.stored_experts)
    context = chosen_context(manifest.model, options)
    tokens = longest_pass(manifest.model, options.slots, context)
    working = working_bytes(manifest, tokens)
    host_bytes = memory_bytes if is_cpu else COPY_SLOTS * max(sizes)
    total = working + (0 if is_cpu else LIBRARY_BYTES)
    place_experts(sizes, (), memory_bytes, COPY_SLOTS, total, 0)  # refuses before anything is opened or read
    dense, note = 0, ""
    if wants_dense(manifest, options):
        dense = dense_bytes(manifest, tokens, options.slots, context)
        fits = total + COPY_SLOTS * max(sizes) + dense <= memory_bytes
        if options.accelerator_dense == "device":
            place_experts(sizes, (), memory_bytes, COPY_SLOTS, total, dense)
        note = "" if fits else f"dense weights, with keys and values, would take {dense / 2**20:.1f} MiB and do not fit"
        dense = dense if fits else 0
    return OpenedAccelerator(name, device, memory_bytes, host_bytes, sizes, total, dense, note)


def wants_dense(manifest: BundleManifest, options: RuntimeOptions) -> bool:
    """Whether dense weights may go to the device. Raises OptionError where they were sent there and cannot."""
    if options.kv == "float16":
        if options.accelerator_dense == "device":
            raise OptionError("keys and values on an accelerator are float32", "leave out `--kv float16`")
        return False
    if manifest.model.encoder is None:
        return options.accelerator_dense != "host"
    if options.accelerator_dense == "device":
        raise OptionError(
            "the dense weights of a model with an encoder are computed by the CPU", "leave out `--accelerator-dense`"
        )
    return False


def _cuda(name: str) -> torch.device:
    """The device `cuda` or `cuda:N`, if it is there. Raises AcceleratorUnavailable."""
    import torch

    index = int(name.partition(":")[2] or 0)  # torch.device keeps it in eight bits
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise AcceleratorUnavailable(
            f"`--accelerator {name}`: torch {torch.__version__} sees {count} CUDA devices here",
            "leave it out to run on the CPU alone",
        )
    return torch.device("cuda", index)


@dataclass(frozen=True, slots=True)
class HostParts:
    """The side of the processor, as it is before the cache begins to read.

    records: calibration frequencies of the experts.
    is_in_host: whether the bytes of a stored expert are in memory now.
    """

    model: Model
    kv: KVCache
    storage: ExpertStorage
    records: ExpertRecords
    is_in_host: Callable[[int], bool]


def start_cooperation(
    opened: OpenedAccelerator,
    manifest: BundleManifest,
    options: RuntimeOptions,
    host: HostParts,
) -> CooperativeExperts:
    """Measure latencies, then bring dense weights and the most popular experts to the device.

    Call before the cache begins to read. Raises MemoryBudgetExceeded, and as
    `ExpertStorage.load`; AcceleratorUnavailable where the device has less memory than it said.
    """
    model, storage, experts = host.model, host.storage, host.model.experts
    count = len(manifest.experts)
    ranked = np.argsort(-host.records.frequency[:count], kind="stable").tolist()
    order = [index for index in ranked if opened.sizes[index]]  # of the others nothing is stored
    dense, dense_latency = _bring_dense(opened, options, model, host.kv)
    try:
        on_device, shared = (0, 0) if dense is None else (opened.dense_bytes, shared_bytes(manifest))
        placement = place_experts(opened.sizes, order, opened.memory_bytes, COPY_SLOTS, opened.working_bytes, on_device)
        from .torch_device import TorchDevice

        device = TorchDevice(opened.name, opened.device, placement.resident_bytes + shared, max(opened.sizes))
    except RuntimeError as error:  # torch's own for a device, or pinned memory, that is full
        raise _full(opened, error) from error
    latency = measure_bundle(device, experts, opened.sizes, storage)
    residents = bring(device, placement, experts, storage)
    kept = {} if dense is None else {layer: device.keep(each.expert) for layer, each in model.shared_experts.items()}
    known = (placement, residents, latency, options.cooperation, host.is_in_host, kept)
    found = CooperativeExperts(device, experts, opened.sizes, *known)
    found.dense, found.dense_latency, found.dense_note = dense, dense_latency, opened.dense_note
    return found


def _full(opened: OpenedAccelerator, error: RuntimeError) -> AcceleratorUnavailable:
    return AcceleratorUnavailable(
        f"`{opened.name}` does not give the {opened.memory_bytes} bytes of its budget: {_first_line(error)}",
        "lower `--accelerator-memory`",
    )


def _bring_dense(
    opened: OpenedAccelerator, options: RuntimeOptions, model: Model, kv: KVCache
) -> tuple[DenseOnDevice | None, DenseLatency | None]:
    """Attention and head on the device, unless they were measured to be slower there and nobody asked for it, nor for
    decisions by what is cached.

    Raises AcceleratorUnavailable where the device is full and somebody did.
    """
    if not opened.dense_bytes:
        return None, None
    from .torch_dense import dense_on, give_back

    # What a measurement decides would decide of experts' places too, and so of what lossy modes take for missed.
    is_asked = options.accelerator_dense == "device" or options.modes.reads_cache
    at = model.spec.first_decoder_layer
    found: DenseOnDevice | None = None
    try:
        found = dense_on(opened.device, model.spec, model.dense, kv.slots, kv.context, opened.dense_bytes)
    except RuntimeError as error:  # torch's own for a device that is full
        if is_asked:
            raise _full(opened, error) from error
    if found is None:  # only here has the error let go of what was made before it
        give_back(opened.device)
        return None, None
    if kv.context < 2:  # nothing to draw a line through, and nothing to gain
        return found if is_asked else None, None
    on_host = AttentionSide(model.dense_part.blocks[at], kv.keys[at], kv.values[at])
    on_device = AttentionSide(found.part.blocks[at], found.kv.keys[at], found.kv.values[at])
    latency = measure_dense(on_host, on_device, model.spec.hidden_size, kv.context, time.perf_counter_ns)
    if is_asked or latency.device_is_faster:
        return found, latency
    del found, on_device
    give_back(opened.device)
    return None, latency


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def measure_bundle(
    device: ExpertDevice, experts: Sequence[kernels.Expert], sizes: Sequence[int], storage: ExpertStorage
) -> LatencyModel:
    """Latencies of a few of the bundle's own experts, read for this and given up again."""
    stored = np.flatnonzero(np.array(sizes))
    by_size = stored[np.argsort(np.array(sizes)[stored], kind="stable")]
    samples = sorted({int(by_size[at]) for at in np.linspace(0, len(by_size) - 1, _SAMPLES).round().astype(int)})
    found = []
    for index in samples:  # one at a time: the budget need not hold more
        storage.load(index)
        found.append(measure_latency(device, experts[index]))
        storage.release(index)
    storage.trim()
    return mean_latency(found)


def bring(
    device: ExpertDevice, placement: Placement, experts: Sequence[kernels.Expert], storage: ExpertStorage
) -> dict[int, DeviceExpert]:
    """Read the residents one after the other and upload them; nothing of them stays in the host's memory."""
    residents = dict[int, DeviceExpert]()
    for index in placement.resident:
        storage.load(index)
        residents[index] = device.keep(experts[index])
        storage.release(index)
    storage.trim()
    return residents
