"""CompilePlan: the value that the search returns and emit executes. Pure data; printing it is the plan-only mode."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from moec.manifests.bundle import unit_offsets
from moec.manifests.model import ExpertKey, ModelSpec, UnitKey
from moec.manifests.quant import QuantSpec


@dataclass(frozen=True, slots=True)
class CompilePlan:
    """A format for every unit and every dense weight.

    units: UnitKey -> QuantSpec for all routed experts.
    dense: canonical name -> QuantSpec, names as in ModelSpec.dense_shapes.
    quantizer: `gptq`, `rtn` or `quanto`, used for units below 16 bits; dense weights are always rounded to nearest.
    low_units: formats of second, smaller versions, for the experts that have one.
    """

    model: ModelSpec
    units: Mapping[UnitKey, QuantSpec]
    dense: Mapping[str, QuantSpec]
    quantizer: str
    low_units: Mapping[UnitKey, QuantSpec] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """SHA-256 over all formats and the quantizer: names a plan in the journal."""
        parts = [self.quantizer, *map(str, self.units.values()), *(f"{n}={s}" for n, s in self.dense.items())]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:24]

    def expert_specs(self, key: ExpertKey, is_low: bool = False) -> dict[str, QuantSpec]:
        """The formats of one expert's projections; is_low: of its low version. Raises KeyError where it has none."""
        units = self.low_units if is_low else self.units
        return {unit.projection: units[unit] for unit in self.model.units_of(key)}

    def expert_padded_bytes(self, key: ExpertKey, is_low: bool = False) -> int:
        """Bytes that one read of this expert, or of its low version, takes from storage."""
        return unit_offsets(self.model, key.layer, self.expert_specs(key, is_low))[1]

    @property
    def low_experts(self) -> tuple[ExpertKey, ...]:
        """The experts that have a low version, in order."""
        return tuple(key for key in self.model.expert_keys() if self.model.units_of(key)[0] in self.low_units)

    @property
    def expert_packed_bytes(self) -> int:
        """Bytes of all routed experts with scales, without padding: what reports of size count."""
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
        """Bytes of everything else, without padding."""
        return round(sum(self.dense_bytes(name, shape) for name, shape in self.model.dense_shapes().items()))

    def dense_bytes(self, name: str, shape: tuple[int, ...]) -> float:
        """Bytes of one dense weight, without padding. shape: as ModelSpec.dense_shapes has it."""
        return (shape[0] if len(shape) == 2 else 1) * self.dense[name].row_bytes(shape[-1])

    @property
    def bits_per_weight(self) -> float:
        """Average stored bits of a routed-expert weight, scales included."""
        return 8 * self.expert_packed_bytes / self.expert_weights
