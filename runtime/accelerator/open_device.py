"""Open the accelerator that the options name, and start cooperation on it.

There are two steps. torch's share of host memory must be known before the budget is split: `open_device`.
The experts can be read only after that: `cooperate` times a few on both sides and uploads the popular ones.
torch is imported here and not earlier.
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
from ..memory.budget import chosen_context
from ..options.runtime import TORCH_CPU, RuntimeOptions
from ..storage.interface import ExpertStorage
from .cooperative import CooperativeExperts
from .dense import AttentionSide, DenseLatency, DenseOnDevice, dense_bytes, measure_dense, shared_bytes
from .device import COPY_SLOTS, DeviceExpert, ExpertDevice
from .grouped.bounds import pinned_bytes
from .image import entry_bytes
from .latency import LatencyModel, mean_latency, measure_latency
from .placement import LIBRARY_BYTES, ResidentExperts, place_experts, working_bytes

if TYPE_CHECKING:
    import torch

    from ..expert_cache.records import ExpertRecords
    from ..layers.kv_cache import KVCache
    from ..model.forward import Model

_SAMPLES = 3
"""Number of experts that are timed: the smallest, the median and the largest."""


@dataclass(frozen=True, slots=True)
class OpenedAccelerator:
    """An accelerator that was opened.

    name: name that the user gave.
    memory_bytes: its budget.
    host_bytes: memory of this process that it takes on the host.
    sizes: bytes of each stored expert on the device; 0 for an expert that is not stored.

    working_bytes: device memory for a pass, in addition to the weights.
    dense_bytes: share of the budget for dense weights; 0 if they stay on the CPU.
    dense_note: why they stay on the CPU, as text for people.
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
    """Open the accelerator with this name and create its context. Call it before the budget is split.

    Raises MissingDependency without torch.
    Raises AcceleratorUnavailable if the device is missing or has less free memory than requested.
    Raises MemoryBudgetExceeded, with the device's floor, if the budget is too small.
    Raises OptionError if dense weights are sent to the device and cannot go there.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"`--accelerator {name}` needs the package `torch`, which is not installed",
            'pip install "moec[cuda]"',
        ) from error
    if manifest.model.needs_cpu:
        raise AcceleratorUnavailable(
            f"`--accelerator {name}` has no kernels for GELU and for a dense branch beside the experts",
            "leave it out to run on the CPU alone",
        )
    is_cpu = name == TORCH_CPU
    device = torch.device("cpu") if is_cpu else _cuda(name)
    given = None if options.accelerator_memory is None else parse_bytes(options.accelerator_memory)
    if not is_cpu:
        torch.zeros(1, device=device)  # from now on the driver's share of this process's memory is allocated
        torch.cuda.reset_peak_memory_stats(device)  # the reported peak starts here
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
    working = working_bytes(manifest, tokens, may_group=not is_cpu)
    pinned = COPY_SLOTS * max(sizes) + pinned_bytes(manifest.model.hidden_size)
    host_bytes = memory_bytes if is_cpu else pinned
    total = working + (0 if is_cpu else LIBRARY_BYTES)
    place_experts(sizes, (), memory_bytes, total, 0)  # raises before anything is opened or read
    dense, note = 0, ""
    if wants_dense(manifest, options):
        dense = dense_bytes(manifest, tokens, options.slots, context)
        fits = total + COPY_SLOTS * max(sizes) + dense <= memory_bytes
        if options.accelerator_dense == "device":
            place_experts(sizes, (), memory_bytes, total, dense)
        note = "" if fits else f"dense weights, with keys and values, would take {dense / 2**20:.1f} MiB and do not fit"
        dense = dense if fits else 0
    return OpenedAccelerator(name, device, memory_bytes, host_bytes, sizes, total, dense, note)


def wants_dense(manifest: BundleManifest, options: RuntimeOptions) -> bool:
    """Return whether dense weights may go to the device.

    Raises OptionError if the options send them there and they cannot go.
    """
    if options.kv == "float16":
        if options.accelerator_dense == "device":
            raise OptionError("keys and values on an accelerator are float32", "leave out `--kv float16`")
        return False
    model = manifest.model
    if model.encoder is None and not model.state_bytes:
        return options.accelerator_dense != "host"
    if options.accelerator_dense == "device":
        part = "an encoder" if model.encoder is not None else "recurrent layers"
        raise OptionError(
            f"the dense weights of a model with {part} are computed by the CPU", "leave out `accelerator-dense`"
        )
    return False


def _cuda(name: str) -> torch.device:
    """Return the device `cuda` or `cuda:N`. Raises AcceleratorUnavailable if it is missing."""
    import torch

    index = int(name.partition(":")[2] or 0)  # `torch.device` stores the index in eight bits
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise AcceleratorUnavailable(
            f"`--accelerator {name}`: torch {torch.__version__} sees {count} CUDA devices here",
            "leave it out to run on the CPU alone",
        )
    return torch.device("cuda", index)


def cooperate(
    opened: OpenedAccelerator,
    manifest: BundleManifest,
    options: RuntimeOptions,
    model: Model,
    kv: KVCache,
    storage: ExpertStorage,
    records: ExpertRecords,
    is_in_host: Callable[[int], bool],
) -> CooperativeExperts:
    """Measure latencies, then upload dense weights and the most popular experts.

    records: calibration frequencies of the experts.
    is_in_host: returns whether the bytes of a stored expert are in memory now.

    Call it before the cache begins to read.
    Raises MemoryBudgetExceeded, and the errors of `ExpertStorage.load`.
    Raises AcceleratorUnavailable if the device has less memory than it reported.
    """
    experts, count = model.experts, len(manifest.experts)
    ranked = np.argsort(-records.frequency[:count], kind="stable").tolist()
    order = [index for index in ranked if opened.sizes[index]]  # experts of size 0 are not stored
    dense, dense_latency = _bring_dense(opened, options, model, kv)
    try:
        dense_share, shared = (0, 0) if dense is None else (opened.dense_bytes, shared_bytes(manifest))
        placement = place_experts(opened.sizes, order, opened.memory_bytes, opened.working_bytes, dense_share)
        from .grouped.triton_check import why_no_triton
        from .torch_device import TorchDevice

        kernels_note = why_no_triton(opened.device)
        resident_bytes = placement.resident_bytes + shared
        device = TorchDevice(opened.name, opened.device, resident_bytes, max(opened.sizes), not kernels_note)
    except RuntimeError as error:  # torch's own error if the device or pinned memory is full
        raise _full(opened, error) from error
    latency = measure_bundle(device, experts, opened.sizes, storage)
    kernels_note = kernels_note or device.note
    residents = bring(device, placement, experts, storage)
    shared_experts = (
        {}
        if dense is None
        else {layer: device.keep(shared_expert.expert) for layer, shared_expert in model.shared_experts.items()}
    )
    cooperative = CooperativeExperts(
        device, experts, opened.sizes, is_in_host, placement, residents, shared_experts, latency, options.cooperation
    )
    cooperative.dense, cooperative.dense_latency, cooperative.dense_note = dense, dense_latency, opened.dense_note
    cooperative.kernels_note = kernels_note
    return cooperative


def _full(opened: OpenedAccelerator, error: RuntimeError) -> AcceleratorUnavailable:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return AcceleratorUnavailable(
        f"`{opened.name}` does not give the {opened.memory_bytes} bytes of its budget: {reason}",
        "lower `--accelerator-memory`",
    )


def _bring_dense(
    opened: OpenedAccelerator, options: RuntimeOptions, model: Model, kv: KVCache
) -> tuple[DenseOnDevice | None, DenseLatency | None]:
    """Build attention and head on the device, and keep them there if they are faster or requested.

    They are requested by `accelerator_dense="device"`, or by lossy modes that decide by the state of the cache.
    Returns the parts on the device and the measured times; either may be None.
    Raises AcceleratorUnavailable if they are requested and the device is full.
    """
    if not opened.dense_bytes:
        return None, None
    from .torch_dense import dense_on, give_back

    # Lossy modes treat missing experts differently. A timing must not change which experts are resident, so it does
    # not decide in these modes.
    is_requested = options.accelerator_dense == "device" or options.modes.reads_cache
    at = model.spec.first_decoder_layer
    dense: DenseOnDevice | None = None
    try:
        dense = dense_on(opened.device, model.spec, model.dense, kv.slots, kv.context, opened.dense_bytes)
    except RuntimeError as error:  # torch's own error if the device is full
        if is_requested:
            raise _full(opened, error) from error
    # The memory of a failed attempt is free only here, where the exception no longer holds references
    if dense is None:
        give_back(opened.device)
        return None, None
    if kv.context < 2:  # one position gives no line to fit, and nothing to gain
        return dense if is_requested else None, None
    on_host = AttentionSide(model.dense_part.blocks[at], kv.keys[at], kv.values[at])
    on_device = AttentionSide(dense.part.blocks[at], dense.kv.keys[at], dense.kv.values[at])
    latency = measure_dense(on_host, on_device, model.spec.hidden_size, kv.context, time.perf_counter_ns)
    if is_requested or latency.device_is_faster:
        return dense, latency
    del dense, on_device
    give_back(opened.device)
    return None, latency


def measure_bundle(
    device: ExpertDevice, experts: Sequence[kernels.Expert], sizes: Sequence[int], storage: ExpertStorage
) -> LatencyModel:
    """Return the mean latency of a few experts of the bundle. They are read for this and released again."""
    stored = np.flatnonzero(np.array(sizes))
    by_size = stored[np.argsort(np.array(sizes)[stored], kind="stable")]
    samples = sorted({int(by_size[at]) for at in np.linspace(0, len(by_size) - 1, _SAMPLES).round().astype(int)})
    latencies = []
    for index in samples:  # one at a time: the budget need not hold more
        storage.load(index)
        latencies.append(measure_latency(device, experts[index]))
        storage.release(index)
    storage.trim()
    return mean_latency(latencies)


def bring(
    device: ExpertDevice, placement: ResidentExperts, experts: Sequence[kernels.Expert], storage: ExpertStorage
) -> dict[int, DeviceExpert]:
    """Read the residents one after the other and upload them. None of them stays in host memory."""
    residents = dict[int, DeviceExpert]()
    for index in placement.resident:
        storage.load(index)
        residents[index] = device.keep(experts[index])
        storage.release(index)
    storage.trim()
    return residents
