"""Decisions of a device profile: objective, recommended cache, refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moec.manifests.bundle import DeviceSummary
from moec.manifests.errors import DoesNotFit
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec
from moec.profiles.device import DeviceProfile
from moec.profiles.memory_floor import FixedMemory, kv_bytes, process_bytes, scratch_bytes, tables_bytes
from moec.profiles.predict import default_objective, expected_misses, predicted_tpot_ns, recommended_cache_bytes

from ..families import Lowering
from ..request.options import UNIFORM_GROUP_SIZE, CompileOptions
from ..request.plan import CompilePlan, plain_plan
from ..request.targets import Objective, reads_decide
from ..sensitivity.sensitivity import dense_formats


def _costs(plan: CompilePlan, popularity: np.ndarray | None) -> tuple[list[tuple[int, float]], int]:
    """Return (padded bytes, reads per token) of each expert, and the bytes that one token's arithmetic touches."""
    model = plan.model
    experts: list[tuple[int, float]] = []
    shapes = model.dense_shapes()
    touched = float(sum(plan.dense_bytes(name, shape) for name, shape in shapes.items() if model.is_decoded_with(name)))
    present = [
        [e for e in range(layer.experts.count) if not plan.units[UnitKey(at, e, "down")].is_pruned]
        for at, layer in enumerate(model.layers)
    ]
    for key in model.expert_keys():
        size = plan.expert_padded_bytes(key)
        total = 0 if popularity is None else int(popularity[key.layer, present[key.layer]].sum())
        even = 1 / max(len(present[key.layer]), 1)
        share = even if popularity is None or not total else popularity[key.layer, key.expert] / total
        experts.append((size, float(model.reads_per_token(key.layer) * share) if size else 0.0))
        touched += experts[-1][0] * experts[-1][1]
    return experts, round(touched)


def fixed_memory(plan: CompilePlan, tokenizer_file_bytes: int) -> FixedMemory:
    """Return the memory of `moec run` with default options, without cached experts. The runtime plans the same numbers.

    tokenizer_file_bytes: size of `tokenizer.json`.
    """
    model = plan.model
    sizes: list[list[int]] = [[] for _ in model.layers]
    for key in model.expert_keys():
        sizes[key.layer].append(plan.expert_padded_bytes(key))
    minimum = max(
        sum(sorted(of_layer, reverse=True)[: layer.experts.top_k])
        for of_layer, layer in zip(sizes, model.layers, strict=True)
    )
    entries = len(model.expert_keys()) + len(plan.low_experts)
    return FixedMemory(
        process_bytes=process_bytes(model, entries, tokenizer_file_bytes),
        dense_bytes=plan.dense_packed_bytes,
        kv_bytes=kv_bytes(model, model.default_context),
        scratch_bytes=scratch_bytes(model, 1, model.default_context),
        tables_bytes=tables_bytes(model),
        minimum_expert_bytes=minimum,
    )


def choose_objective(
    profile: DeviceProfile,
    requested: Objective | None,
    plain: CompilePlan,
    popularity: np.ndarray | None,
    tokenizer_file_bytes: int = 0,
) -> bool:
    """Return whether bytes count by reads.

    The user's objective decides. Without one, the profile decides for this model with all experts at 8 bits.
    A probed profile is rounded first, so that two probes of one machine agree.
    tokenizer_file_bytes: size of `tokenizer.json`.
    """
    steady = profile.rounded()
    eight = replace(plain, units={unit: QuantSpec(8) for unit in plain.units})
    experts, touched = _costs(eight, popularity)
    try:
        fixed = fixed_memory(eight, tokenizer_file_bytes)
        cache = recommended_cache_bytes(steady, fixed, sum(size for size, _ in experts))
    except DoesNotFit:
        # Smaller formats may still fit. `summarise_device` checks the final plan.
        cache = 0
    missed, reads = expected_misses(experts, cache)
    objective = requested or default_objective(steady, touched, missed, reads)
    compute_ns = touched / steady.memory_bytes_per_s * 1e9
    return reads_decide(objective, compute_ns, missed, steady.storage_bytes_per_s)


def predicted_token_ns(
    profile: DeviceProfile, plan: CompilePlan, popularity: np.ndarray | None, tokenizer_file_bytes: int
) -> int | None:
    """Return the predicted time per output token of a plan on a device, or None if the device cannot hold it.

    popularity: tokens of calibration per layer and expert; None: experts are equally popular.
    tokenizer_file_bytes: size of `tokenizer.json`.
    """
    experts, touched = _costs(plan, popularity)
    try:
        fixed = fixed_memory(plan, tokenizer_file_bytes)
        cache = recommended_cache_bytes(profile, fixed, sum(size for size, _ in experts))
    except DoesNotFit:
        return None
    missed, reads = expected_misses(experts, cache)
    return predicted_tpot_ns(profile, touched, missed, reads)


def summarise_device(profile: DeviceProfile, plan: CompilePlan, tokenizer_file_bytes: int = 0) -> DeviceSummary:
    """Return the device entry of the manifest.

    A probed host leaves budget and cache to the run (0): free memory changes by the minute, and bundles must not.
    tokenizer_file_bytes: size of `tokenizer.json`.
    Raises DoesNotFit if the plan's memory floor exceeds the budget.
    """
    total = sum(plan.expert_padded_bytes(key) for key in plan.model.expert_keys())
    cache = recommended_cache_bytes(profile, fixed_memory(plan, tokenizer_file_bytes), total)
    if profile.is_probed:
        return DeviceSummary(profile.name, profile.sha256, 0, 0)
    return DeviceSummary(profile.name, profile.sha256, profile.memory_budget_bytes, cache)


def smallest_plan(lowering: Lowering, options: CompileOptions, specs: Sequence[QuantSpec]) -> CompilePlan:
    """Return the plan with every weight in its smallest format. If it does not fit a device, no plan does."""
    plain = plain_plan(lowering.model, lowering.spec_16bit, options.quantizer)
    width = min(options.dense_widths())
    (dense,) = dense_formats(plain, (width,), UNIFORM_GROUP_SIZE, lowering.float_type)
    units = {}
    for unit in plain.units:
        columns = lowering.model.unit_shape(unit.layer, unit.projection)[1]
        fitting = [spec for spec in specs if spec.fits(columns)]
        units[unit] = min(fitting, key=lambda spec: spec.row_bytes(columns))
    return replace(plain, units=units, dense=dense)
