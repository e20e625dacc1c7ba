"""CompilePlan: the result of the search and the input of emit; and what a compile returns. Pure data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from moec.evaluation.statistics import LossEstimate
from moec.manifests.bundle import DeviceSummary, unit_offsets
from moec.manifests.errors import PlanError
from moec.manifests.model import ExpertKey, ModelSpec, UnitKey
from moec.manifests.quant import QuantSpec

from ..quantization.unit_store import UnitStore


@dataclass(frozen=True, slots=True)
class CompilePlan:
    """A format for every unit and every dense weight.

    model: the ModelSpec.
    units: UnitKey -> QuantSpec for all routed experts.
    dense: canonical name -> QuantSpec, with the names of ModelSpec.dense_shapes.
    quantizer: `gptq`, `rtn` or `quanto`, used for units below 16 bits. Dense weights are always rounded to nearest.
    low_units: formats of second, smaller versions, for the experts that have one.
    """

    model: ModelSpec
    units: Mapping[UnitKey, QuantSpec]
    dense: Mapping[str, QuantSpec]
    quantizer: str
    low_units: Mapping[UnitKey, QuantSpec] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """SHA-256 over all formats and the quantizer. It names a plan in the journal."""
        parts = [self.quantizer, *map(str, self.units.values()), *(f"{n}={s}" for n, s in self.dense.items())]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:24]

    def expert_specs(self, key: ExpertKey, is_low: bool = False) -> dict[str, QuantSpec]:
        """Return the formats of one expert's projections.

        is_low: return those of its low version.
        Raises KeyError if the expert has no low version.
        """
        units = self.low_units if is_low else self.units
        return {unit.projection: units[unit] for unit in self.model.units_of(key)}

    def expert_padded_bytes(self, key: ExpertKey, is_low: bool = False) -> int:
        """Return the bytes that one read of this expert, or of its low version, takes from storage."""
        return unit_offsets(self.model, key.layer, self.expert_specs(key, is_low))[1]

    @property
    def low_experts(self) -> tuple[ExpertKey, ...]:
        """Experts with a low version, in order."""
        return tuple(key for key in self.model.expert_keys() if self.model.units_of(key)[0] in self.low_units)

    @property
    def expert_packed_bytes(self) -> int:
        """Bytes of all routed experts with scales, without padding. Reports of size use this number."""
        total = 0.0
        for unit, spec in self.units.items():
            rows, columns = self.model.unit_shape(unit.layer, unit.projection)
            total += rows * spec.row_bytes(columns)
        return round(total)

    @property
    def expert_weights(self) -> int:
        """Number of weights in routed experts."""
        shapes = (self.model.unit_shape(unit.layer, unit.projection) for unit in self.units)
        return sum(rows * columns for rows, columns in shapes)

    @property
    def dense_packed_bytes(self) -> int:
        """Bytes of all dense weights, without padding."""
        return round(sum(self.dense_bytes(name, shape) for name, shape in self.model.dense_shapes().items()))

    def dense_bytes(self, name: str, shape: tuple[int, ...]) -> float:
        """Return the bytes of one dense weight, without padding.

        shape: its shape in ModelSpec.dense_shapes.
        """
        return (shape[0] if len(shape) == 2 else 1) * self.dense[name].row_bytes(shape[-1])

    @property
    def bits_per_weight(self) -> float:
        """Mean stored bits of a routed-expert weight, scales included."""
        return 8 * self.expert_packed_bytes / self.expert_weights


def plain_plan(model: ModelSpec, spec_16bit: QuantSpec, quantizer: str) -> CompilePlan:
    """Return the plan with all weights at the checkpoint's own 16 bits."""
    units = dict.fromkeys(model.unit_keys(), spec_16bit)
    return CompilePlan(model, units, dict.fromkeys(model.dense_shapes(), spec_16bit), quantizer)


def with_low_versions(plan: CompilePlan, spec: QuantSpec, store: UnitStore | None = None) -> CompilePlan:
    """Return the plan with a version in this format for each expert that is larger than that version.

    A runtime can use it instead of a missing expert (dynamic precision).
    store: knows which units the format does not hold. Their experts get no version. None: all are held.
    Raises PlanError if no expert is larger.
    """
    low: dict[UnitKey, QuantSpec] = {}
    for key in plan.model.expert_keys():
        units = plan.model.units_of(key)
        specs = {unit.projection: spec for unit in units}
        is_held = store is None or all(store.holds(unit, spec) for unit in units)
        if is_held and unit_offsets(plan.model, key.layer, specs)[1] < plan.expert_padded_bytes(key):
            low.update(dict.fromkeys(units, spec))
    if not low:
        raise PlanError(
            f"`--fallback-bits {spec.bitwidth}`: no expert is larger than its version in {spec}",
            "leave it out, or take fewer bits",
        )
    return replace(plan, low_units=low)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One loss of a sweep.

    target: the relative loss.
    plan: the plan that keeps it, or None if no plan does.
    losses: losses of the plan on validation items, per task.
    kl: mean KL of the plan on validation items, nats per token.
    baselines: expert bytes of the best plan of each kind at the same loss, None where no plan keeps it.
    """

    target: float
    plan: CompilePlan | None
    losses: Mapping[str, LossEstimate]
    kl: float | None
    baselines: Mapping[str, int | None]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        plan = self.plan
        return {
            "target": self.target,
            "expert_packed_bytes": None if plan is None else plan.expert_packed_bytes,
            "dense_packed_bytes": None if plan is None else plan.dense_packed_bytes,
            "bits_per_weight": None if plan is None else plan.bits_per_weight,
            "losses": {task: estimate.to_json() for task, estimate in self.losses.items()},
            "kl": self.kl,
            "baselines": dict(self.baselines),
        }


LossCurve = tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True)
class CompileResult:
    """The result of a compile.

    path: the bundle, or None after a plan-only run.
    quality: content of quality.json.
    curve: points of a sweep, or None.
    popularity: tokens of each expert, on devices or else in calibration, per layer; or None.
    device: the device entry of the bundle's manifest, or None after a plan-only run.
    """

    path: Path | None
    plan: CompilePlan
    quality: dict[str, Any]
    curve: LossCurve | None = None
    popularity: np.ndarray | None = None
    device: DeviceSummary | None = None
