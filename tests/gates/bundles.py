"""Bundles for the gates: a checkpoint emitted with a uniform or a mixed plan, certified without an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from moec.compiler.bundle.emit import BundleContent, PackedUnits, emit, finish
from moec.compiler.bundle.publish import publish_directory
from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.families import Lowering, lower
from moec.compiler.preflight.device_fit import summarise_device
from moec.compiler.request.plan import CompilePlan, with_low_versions
from moec.compiler.request.uniform import uniform_plan
from moec.compiler.workspace.durable import Disk
from moec.manifests.bundle import DeviceSummary
from moec.manifests.model import ExpertKey
from moec.manifests.quant import PRUNED, QuantSpec
from moec.profiles.device import DeviceProfile
from moec.runtime import Engine

DEVICE = DeviceSummary("host", "0" * 64, 1 << 30, 1 << 29)
MIXED = tuple(QuantSpec.parse(text) for text in ("q2g32", "q3g32", "q4s", "q8", "bf16", "q4g32"))


def mixed_formats(plan: CompilePlan) -> CompilePlan:
    """Return the plan with another format for each unit than for the units next to it."""
    fitting = [spec if spec.bitwidth < 16 else plan.dense["final_norm"] for spec in MIXED]
    units = {unit: fitting[index % len(fitting)] for index, unit in enumerate(plan.units)}
    return replace(plan, units=units)


def emit_bundle(
    checkpoint_folder: Path,
    target: Path,
    bitwidth: int = 16,
    mixed: bool = False,
    low: str | None = None,
    pruned: Sequence[ExpertKey] = (),
    dense_bits: int = 16,
    profile: DeviceProfile | None = None,
) -> Path:
    """Compile with one format for all experts, or with many.

    low: format of low versions.
    pruned: experts that are left out.
    profile: the named device that the bundle is for; None: the probed host.
    """
    lowering = lower(open_checkpoint(str(checkpoint_folder)))
    experts = lowering.spec_16bit if bitwidth == 16 else QuantSpec(bitwidth, 32)
    dense = lowering.spec_16bit if dense_bits == 16 else QuantSpec(dense_bits, experts.group_size)
    plan = uniform_plan(lowering.model, experts, dense, lowering.float_type)
    plan = mixed_formats(plan) if mixed else plan
    left_out = {unit: QuantSpec(PRUNED) for key in pruned for unit in plan.model.units_of(key)}
    plan = replace(plan, units={**plan.units, **left_out})
    if low is not None:
        plan = with_low_versions(plan, QuantSpec.parse(low))
    device = DEVICE if profile is None else summarise_device(profile, plan)
    return publish_plan(lowering, BundleContent(plan, device, profile=profile), target)


def publish_plan(
    lowering: Lowering,
    content: BundleContent,
    target: Path,
    packed_units: PackedUnits | None = None,
    learned: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a bundle, and return its folder.

    packed_units: see `emit`.
    learned: content of further files by name.
    """
    partial, disk = target.with_name(target.name + ".partial"), Disk()
    manifest = emit(lowering, content, partial, packed_units=packed_units, disk=disk)
    finish(partial, manifest, b"{}\n", b"# test\n", disk, learned)
    publish_directory(disk, partial, target)
    return target


def stepwise_logits(engine: Engine, tokens: Sequence[int], first: int, prompt: Sequence[int] = ()) -> np.ndarray:
    """Return the logits [T, V] of tokens: the first ones in one pass, the rest one by one.

    prompt: what an encoder reads.
    """
    rows = [engine.logits(tokens[:first], prompt)]
    for position in range(first, len(tokens)):
        rows.append(engine.model.logits(engine.step([tokens[position]], [0], [position])))
    return np.concatenate(rows)
