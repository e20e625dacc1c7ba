"""Predicted time per token of a bundle on a device, from a trace, without a clock.

`moec simulate` takes the computing times of a trace. Here they are those of the ceiling: the bytes of the weights that
a pass touches, over the memory rate of the device. So a result does not depend on the load of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moec.cli.measuring.ceiling import predict
from moec.cli.simulation.predictions import Row, Simulation
from moec.cli.simulation.traces import ReplayedBundle, replayed_bundle
from moec.manifests.bundle import ExpertEntry, unit_offsets
from moec.manifests.quant import QuantSpec
from moec.profiles.device import DeviceProfile
from moec.profiles.loading import load_profile
from moec.runtime.bundle.open_bundle import Bundle
from moec.runtime.expert_cache.policies import PolicyScore
from moec.runtime.options.runtime import Prefetch
from moec.runtime.simulation.recorded_advice import no_advice, recorded_advice, table_advice
from moec.runtime.simulation.timeline import Advice, DeviceRates
from moec.runtime.trace.trace import Trace, TracedPass

from .inputs import mean

NS_PER_S = 10**9
READERS = 2


@dataclass(frozen=True)
class Arm:
    """A setting of the simulated runtime.

    cache_bytes: bytes for routed experts; None: the least that the bundle runs with.
    prefetch: `lookahead` takes the advice of the trace.
    modes: options of lossy modes; empty for an exact run.
    is_warm: whether the cache starts with the most popular experts.
    """

    cache_bytes: int | None
    policy: str | PolicyScore = "lrfu"
    prefetch: Prefetch = "lookahead"
    modes: tuple[tuple[str, str], ...] = ()
    is_warm: bool = True


class Device:
    """A device profile with its storage, or with another one.

    storage_bytes_per_s: None for the profile's.
    """

    def __init__(self, name: str, storage_bytes_per_s: int | None = None) -> None:
        self.profile: DeviceProfile = load_profile(name)
        if storage_bytes_per_s is not None:
            self.profile = replace(self.profile, storage_bytes_per_s=storage_bytes_per_s)

    @property
    def rates(self) -> DeviceRates:
        """Rates of the device. Traces already have its computing times."""
        own = self.profile
        return DeviceRates(own.storage_bytes_per_s, own.storage_latency_ns, READERS, compute_scale=1.0)

    def with_own_times(self, trace: Trace, bundle: Bundle) -> Trace:
        """Return a trace with the computing times of the ceiling on this device."""
        sizes = {(entry.layer, entry.expert): entry.size_bytes for entry in bundle.manifest.experts}
        dense_bytes = _dense_bytes(bundle, self.profile)
        return replace(trace, passes=tuple(self._timed(each, dense_bytes, sizes) for each in trace.passes))

    def _timed(self, each: TracedPass, dense_bytes: float, sizes: dict[tuple[int, int], int]) -> TracedPass:
        ns_per_byte, layers = NS_PER_S / self.profile.memory_bytes_per_s, len(each.chosen)
        experts = [
            round(sum(sizes[layer, expert] for expert in set(chosen)) * ns_per_byte)
            for layer, chosen in enumerate(each.chosen, each.first_layer)
        ]
        return replace(
            each,
            dense_ns=(round(dense_bytes * ns_per_byte / layers),) * layers,
            experts_ns=tuple(experts),
            shared_ns=(0,) * layers,
            head_ns=0,
            elapsed_ns=0,
            stall_ns=0,
        )


def _dense_bytes(bundle: Bundle, profile: DeviceProfile) -> float:
    """Return the bytes of the weights outside the routed experts that one token touches."""
    popularity, model = bundle.tables().popularity, bundle.manifest.model
    experts = 0.0
    for entry in bundle.manifest.experts:
        seen = int(popularity[entry.layer].sum())
        share = (
            int(popularity[entry.layer, entry.expert]) / seen if seen else 1 / model.layers[entry.layer].experts.count
        )
        experts += entry.size_bytes * share * model.reads_per_token(entry.layer)
    return float(predict(bundle, profile, 0)["compute_bytes_per_token"] - experts)


def reformatted(bundle: Bundle, specs: Sequence[QuantSpec]) -> Bundle:
    """Return a bundle for simulations whose experts have these formats, one after the other. Nothing can be read.

    Raises ValueError if the experts of a layer take more bytes than its file has.
    """
    model, cost, ends, entries = bundle.manifest.model, bundle.manifest.cost, dict[str, int](), list[ExpertEntry]()
    padded: list[list[int]] = [[] for _ in model.layers]
    packed = 0
    for entry, spec in zip(bundle.manifest.experts, specs, strict=True):
        formats = dict.fromkeys(model.layers[entry.layer].experts.projections, spec)
        start, size = ends.get(entry.file, entry.offset_bytes), unit_offsets(model, entry.layer, formats)[1]
        gate = spec if "gate" in formats else None
        entries.append(replace(entry, offset_bytes=start, size_bytes=size, gate=gate, up=spec, down=spec))
        ends[entry.file] = start + size
        padded[entry.layer].append(size)
        packed += sum(spec.packed_bytes(*model.unit_shape(entry.layer, projection)) for projection in formats)
    ratio, counts = packed / cost.expert_packed_bytes, [layer.experts.top_k for layer in model.layers]
    most = sum(k * max(each) for each, k in zip(padded, counts, strict=True))
    renewed = replace(
        cost,
        expert_packed_bytes=packed,
        expert_padded_bytes=sum(map(sum, padded)),
        expert_bits_per_weight=cost.expert_bits_per_weight * ratio,
        expected_read_bytes_per_token=min(most, int(cost.expected_read_bytes_per_token * ratio)),
        minimum_expert_bytes=max(sum(sorted(each)[-k:]) for each, k in zip(padded, counts, strict=True)),
    )
    return replace(bundle, manifest=replace(bundle.manifest, experts=tuple(entries), cost=renewed))


def simulate(bundle: Bundle, trace: Trace, device: Device, arm: Arm) -> Row:
    """Return the prediction of one setting on one trace."""
    timed = device.with_own_times(trace, bundle)
    replayed: ReplayedBundle = replayed_bundle(bundle)
    if not arm.is_warm:
        replayed = replace(replayed, warm=[])
    capacity = replayed.minimum_bytes if arm.cache_bytes is None else arm.cache_bytes
    advice = advice_of(bundle, timed, arm.prefetch)
    simulation = Simulation(bundle, timed, replayed, device.rates, arm.prefetch, advice)
    settings: Sequence[dict[str, str]] = [{}, dict(arm.modes)] if arm.modes else [{}]
    return simulation.rows([capacity], {"policy": arm.policy}, settings)[-1]


def mean_gain(bundle: Bundle, traces: Sequence[Trace], device: Device, arm: Arm) -> float:
    """Return how many times as fast a lossy setting is as the exact one, the mean of all traces."""
    return mean([float(simulate(bundle, trace, device, arm).gain or 0) for trace in traces])


def advice_of(bundle: Bundle, trace: Trace, prefetch: Prefetch) -> Advice:
    """Return what is read ahead."""
    if prefetch == "off":
        return no_advice
    if prefetch == trace.header.prefetch:
        return recorded_advice
    return table_advice(prefetch, bundle.tables(), bundle.manifest.model, trace)
