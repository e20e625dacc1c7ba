"""Prepare traces and bundles for replays, and check that they fit each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moec.manifests.errors import InputError, OptionError

from ..terminal import output

if TYPE_CHECKING:
    import numpy as np

    from moec.profiles.device import DeviceProfile
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.engine.engine import Engine
    from moec.runtime.expert_cache.cache_spec import CacheSpec
    from moec.runtime.expert_cache.records import ExpertRecords
    from moec.runtime.options.runtime import RuntimeOptions
    from moec.runtime.trace.trace import Trace, TraceHeader, TraceRecorder


@dataclass(frozen=True)
class ReplayedBundle:
    """Properties of a bundle that replays need.

    sizes: bytes of each stored expert in whole pages, low versions last, int64 [N].
    records: layers and calibration frequencies of the experts.

    warm: experts in a cache at the start, in order.
    minimum_bytes: bytes of the experts that one token needs in a layer.

    count: number of experts without their low versions.
    next_in_file: expert that follows each one on storage, as in `read_runs`.
    """

    sizes: np.ndarray
    records: ExpertRecords
    warm: list[int]
    minimum_bytes: int
    count: int
    next_in_file: list[int]

    @property
    def total_bytes(self) -> int:
        """Bytes of all experts without their low versions."""
        return int(self.sizes[: self.count].sum())

    def cache_spec(self, capacity_bytes: int) -> CacheSpec:
        """Return a cache of these experts. Experts read ahead leave room for those that one token needs in a layer."""
        from moec.runtime.expert_cache.cache_spec import CacheSpec

        return CacheSpec(self.sizes, capacity_bytes, self.records, capacity_bytes - self.minimum_bytes)

    def capacity_bytes(self, share: float) -> int | None:
        """Return a share of the bytes of all experts.

        Returns None with a message if that is less than a token needs in a layer.
        """
        capacity = int(self.total_bytes * share)
        if capacity >= self.minimum_bytes:
            return capacity
        output.say(f"a cache of {share:.0%} is under the minimum of one layer's experts, left out")
        return None


def replayed_bundle(bundle: Bundle) -> ReplayedBundle:
    """Return the properties of a bundle that replays need."""
    import numpy as np

    from moec.runtime.expert_cache.records import bundle_records, warm_order
    from moec.runtime.storage.interface import page_bytes
    from moec.runtime.storage.read_runs import next_in_file

    manifest, count = bundle.manifest, len(bundle.manifest.experts)
    sizes = np.array([page_bytes(entry.size_bytes) for entry in manifest.stored_experts], np.int64)
    records = bundle_records(bundle, bundle.tables(), manifest.stored_experts)
    warm = [index for index in warm_order(records).tolist() if index < count]
    following = next_in_file(manifest.stored_experts)
    return ReplayedBundle(sizes, records, warm, manifest.cost.minimum_expert_bytes, count, following)


def recorded_trace(engine: Engine, tracer: TraceRecorder, prompt_tokens: int, host: DeviceProfile) -> Trace:
    """Return the recorded passes of an engine as a trace.

    host: rates of this machine, measured before the run. If the run read enough, its own rate of storage replaces the
        measured one. A probe with smaller single reads showed 20 to 30 % less than two readers of 3.4 MiB reached.
    """
    from moec.runtime.trace.trace import Trace

    header = replace(
        trace_header(engine, prompt_tokens),
        memory_bytes_per_s=host.memory_bytes_per_s,
        storage_bytes_per_s=tracer.read_bytes_per_s or host.storage_bytes_per_s,
        storage_latency_ns=host.storage_latency_ns,
    )
    return Trace(header, tuple(tracer.passes))


def trace_header(engine: Engine, prompt_tokens: int) -> TraceHeader:
    """Return the header of a trace of this engine, without rates of the machine."""
    from moec.manifests.expert_use import architecture_digest
    from moec.runtime import kernels
    from moec.runtime.trace.trace import TraceHeader
    from moec.runtime.tuning.tune_file import bundle_sha256

    model, layers = engine.model.spec, engine.model.spec.layers
    return TraceHeader(
        bundle=bundle_sha256(engine.bundle.path),
        experts=tuple(layer.experts.count for layer in layers),
        top_k=tuple(layer.experts.top_k for layer in layers),
        prompt_tokens=prompt_tokens,
        prefetch=engine.options.prefetch if engine.model.advisor.predictor is not None else "off",
        prefetch_layers=engine.options.prefetch_layers,
        prefetch_experts=engine.options.prefetch_experts,
        prefetch_rule=engine.options.prefetch_rule,
        threads=kernels.threads(),
        memory_bytes_per_s=0,
        storage_bytes_per_s=0,
        storage_latency_ns=0,
        first_decoder_layer=model.first_decoder_layer,
        architecture=architecture_digest(model),
        left_out=tuple(map(tuple, engine.bundle.manifest.pruned_experts)),
    )


@contextmanager
def written_trace(path: Path | None, engine: Engine, prompt_tokens: int) -> Iterator[None]:
    """Write the passes of a generation while they run, without router outputs. No path: nothing is recorded.

    Raises the errors of `output_file`.
    """
    from moec.runtime.trace.trace import TraceRecorder
    from moec.runtime.trace.trace_file import growing_trace

    if path is None:
        yield
        return
    model, first = engine.model, engine.model.spec.first_decoder_layer
    with growing_trace(path, trace_header(engine, prompt_tokens)) as take:
        recorder = TraceRecorder(model.times, lambda: engine.cache.stats, first, keeps_scores=False, take=take)
        model.trace = recorder
        try:
            yield
            recorder.end()
        finally:
            model.trace = None


def check_traceable(options: RuntimeOptions) -> None:
    """Refuse a trace of a run with lossy modes or an accelerator. Raises OptionError."""
    if not options.modes.is_exact:
        raise OptionError("a routing trace is of an exact run", "leave out `--lossy`")
    if options.accelerator is not None:
        raise OptionError("a routing trace tells how long the CPU took", "leave out `--accelerator`")


def open_traces(paths: Sequence[Path], bundle: Bundle) -> list[Trace]:
    """Read traces that fit a bundle.

    Raises InputError on a damaged file, one of another model, or one that chooses experts that the bundle left out.

    A trace of another compile of the same model has nearly the same choices and other times. A message says so.
    """
    from moec.runtime.trace.trace_file import read_trace
    from moec.runtime.tuning.tune_file import bundle_sha256

    digest = bundle_sha256(bundle.path)
    traces: list[Trace] = []
    model = bundle.manifest.model
    pruned = [set(experts) for experts in bundle.manifest.pruned_experts]
    shape = [(layer.experts.count, layer.experts.top_k) for layer in model.layers]
    for path in paths:
        trace = read_trace(path)
        traced_shape = list(zip(trace.header.experts, trace.header.top_k, strict=True))
        encoder_layers = trace.header.first_decoder_layer
        if (traced_shape, encoder_layers) != (shape, model.first_decoder_layer):
            raise InputError(
                f"the trace `{path}` is of a model of {_shape_text(traced_shape, encoder_layers)}, the bundle has "
                f"{_shape_text(shape, model.first_decoder_layer)}",
                "record one with `moec bench BUNDLE --trace-out FILE`",
            )
        for step in trace.passes:
            for layer, chosen in enumerate(step.chosen, step.first_layer):
                if not pruned[layer].isdisjoint(chosen):
                    expert = min(pruned[layer].intersection(chosen))
                    raise InputError(
                        f"the trace `{path}` chooses expert {expert} of layer {layer}, which the bundle leaves out",
                        "record one with `moec bench BUNDLE --trace-out FILE`",
                    )
        if trace.header.bundle != digest:
            output.say(f"warning: `{path}` was recorded on another compile; its computing times are of that one")
        traces.append(trace)
    return traces


def _shape_text(shape: Sequence[tuple[int, int]], encoder_layers: int) -> str:
    kinds = sorted(set(shape), reverse=True)
    experts = ", ".join(f"{count} experts, top-{top_k}" for count, top_k in kinds[:3])
    of_encoder = f", {encoder_layers} of them an encoder's," if encoder_layers else ""
    return f"{len(shape)} layers{of_encoder} ({experts})"
