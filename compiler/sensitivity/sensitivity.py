"""Sensitivity of each unit to each format: predicted KL.

* fisher: KL of a unit in a format to second order, from gradients (fisher.py).
* proxy: output error of the unit, times a gain. The gain is measured per layer: KL at a probe format over the error
  there (stages/sweep.py). Dense weights always use this, per group.
* exact: EdgeMoE's measurement, one expert at a time. It corrects the prediction of each expert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moec.manifests.errors import OptionError
from moec.manifests.model import PROJECTIONS, ExpertKey, ModelSpec, UnitKey, keeps_16_bits
from moec.manifests.progress import Progress
from moec.manifests.quant import FloatType, QuantSpec

from ..quantization.unit_store import UnitStore
from ..request.plan import CompilePlan
from ..request.uniform import dense_spec, fits_all
from .exact import importance_list
from .fisher import ranks_well
from .trials import Trials

# At 3 bits the KL of one projection of one layer exceeds rounding, and is still proportional to the error.
PROBE_BITWIDTH = 3


@dataclass(frozen=True, slots=True)
class DenseGroup:
    """Dense weights that share a format: attention of a layer, embedding, lm_head."""

    name: str
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SensitivityTable:
    """Predicted KL of every choice.

    The KL of a unit is corrections[expert] x predicted, or corrections[expert] x gain[layer, projection] x error.
    gains: [L, 3] in the order of PROJECTIONS, KL per output error.
    dense_gains: KL per weight error, per group.
    corrections: [L, E], ones unless measured.
    predicted: KL of a unit in a format below 16 bits, or None to use gain and error.
    """

    gains: np.ndarray
    dense_gains: Mapping[str, float]
    corrections: np.ndarray
    predicted: Mapping[tuple[UnitKey, QuantSpec], float] | None = None

    def unit_loss(self, store: UnitStore, unit: UnitKey, spec: QuantSpec) -> float:
        """Return the predicted KL in nats per token if only this unit is stored in this format.

        It is infinite if the format does not hold the values of the unit.
        """
        if not store.holds(unit, spec):
            return math.inf
        correction = float(self.corrections[unit.layer, unit.expert])
        if self.predicted is not None and spec.bitwidth < 16:
            return correction * self.predicted[(unit, spec)]
        return correction * float(self.gains[unit.layer, PROJECTIONS.index(unit.projection)]) * store.error(unit, spec)

    def dense_loss(self, store: UnitStore, group: DenseGroup, specs: Mapping[str, QuantSpec]) -> float:
        """Return the predicted KL of one dense group."""
        return self.dense_gains[group.name] * sum(store.dense_error(name, specs[name]) for name in group.tensors)


def dense_groups(model: ModelSpec) -> tuple[DenseGroup, ...]:
    """Return all dense weights that may go below 16 bits, in groups."""
    groups = [DenseGroup("embedding", ("embedding",))]
    matrices = [name for name, shape in model.dense_shapes().items() if not keeps_16_bits(name, shape)]
    for layer in range(model.num_layers):
        of_layer = [name for name in matrices if name.startswith(f"layers.{layer}.")]
        shared = tuple(name for name in of_layer if ".shared_" in name)
        groups.append(DenseGroup(f"layers.{layer}.attention", tuple(name for name in of_layer if name not in shared)))
        if shared:
            groups.append(DenseGroup(f"layers.{layer}.shared", shared))
    if not model.tie_embeddings:
        groups.append(DenseGroup("lm_head", ("lm_head",)))
    return tuple(groups)


def probed(
    model: ModelSpec, layer: int, projection: str, unit_specs: Sequence[QuantSpec]
) -> tuple[list[UnitKey], QuantSpec | None]:
    """Return the units of one projection of a layer, and their probe format, None if no format below 16 bits fits."""
    units = [unit for unit in model.units_of_layer(layer) if unit.projection == projection]
    return units, probe_format(unit_specs, model.unit_shape(layer, projection)[1])


def probe_format(specs: Sequence[QuantSpec], columns: int) -> QuantSpec | None:
    """Return the format in which the error of a unit is measured; None if no format below 16 bits fits its columns."""
    fitting = [spec for spec in specs if spec.bitwidth < 16 and spec.fits(columns)]
    return nearest_format(fitting, PROBE_BITWIDTH) if fitting else None


def with_gradients(
    table: SensitivityTable,
    store: UnitStore,
    specs: Sequence[QuantSpec],
    predicted: Mapping[tuple[UnitKey, QuantSpec], float],
) -> SensitivityTable:
    """Return a sweep's table with units priced by gradients, on the scale of its dense weights.

    The sweep measures KL on all tokens of its probe texts, and gradients predict it on answers. Predictions are
    therefore multiplied by a ratio: the measured cost of all experts in their probe format, over the predicted cost.
    Units of experts that no token chose keep the price of their errors, and such experts are not pruned.
    specs: formats below 16 bits.
    """
    measured = foreseen = 0.0
    for layer in store.model.expert_layers:
        for name in store.model.layers[layer].experts.projections:
            units, probe = probed(store.model, layer, name, specs)
            known = [unit for unit in units if (unit, probe) in predicted]
            if probe is not None:
                measured += sum(table.unit_loss(store, unit, probe) for unit in known)
                foreseen += sum(predicted[(unit, probe)] for unit in known)
    factor = measured / foreseen if measured > 0 and foreseen > 0 else 1.0
    priced = {key: factor * kl for key, kl in predicted.items()}
    for unit in store.model.unit_keys():
        for spec in specs:
            if (unit, spec) not in priced and spec.fits(store.model.unit_shape(unit.layer, unit.projection)[1]):
                priced[(unit, spec)] = table.unit_loss(store, unit, spec)
    return replace(table, predicted=priced)


def correct_by_expert(
    table: SensitivityTable, store: UnitStore, measured: Mapping[ExpertKey, float], low: QuantSpec, high: QuantSpec
) -> SensitivityTable:
    """Scale each expert's prediction to its measured loss, with that expert at `low` and the others at `high`.

    measured: increase of the loss over all experts at `high`, in any unit. Only ratios between experts matter. They are
        limited to a factor of 4, since single measurements are noisy.
    """
    predicted = {
        key: sum(
            table.unit_loss(store, UnitKey(*key, p), low) - table.unit_loss(store, UnitKey(*key, p), high)
            for p in store.model.layers[key.layer].experts.projections
        )
        for key in measured
    }
    scale = sum(max(v, 0.0) for v in measured.values()) / max(sum(predicted.values()), 1e-30)
    corrections = table.corrections.copy()
    for key, value in measured.items():
        if predicted[key] > 0 and scale > 0:
            corrections[key.layer, key.expert] = float(np.clip(value / (scale * predicted[key]), 0.25, 4.0))
    return replace(table, corrections=corrections)


def dense_formats(
    plain: CompilePlan, widths: Sequence[int], group_size: int, float_type: FloatType
) -> tuple[dict[str, QuantSpec], ...]:
    """Return formats of all dense weights, one mapping per bitwidth on offer. Norms and routers always keep 16 bits."""
    shapes = plain.model.dense_shapes()
    return tuple(
        {name: dense_spec(name, shape, width, group_size, float_type) for name, shape in shapes.items()}
        for width in widths
    )


def corrected_by_measurement(
    table: SensitivityTable, trials: Trials, plain: CompilePlan, unit_specs: Sequence[QuantSpec], progress: Progress
) -> SensitivityTable:
    """Return the table with EdgeMoE's measurement of each expert. Raises OptionError without a format that fits all.

    unit_specs: formats on offer.
    progress: called with (plans done, plans in all).
    """
    held_formats = trials.store.held_by_all(unit_specs)
    fitting = [spec for spec in held_formats if spec.bitwidth < 16 and fits_all(plain, spec)]
    if not fitting:
        raise OptionError(
            "`--sensitivity exact` puts whole experts below 16 bits, and no format on offer fits all their matrices",
            f"take `--sensitivity {'fisher' if ranks_well(plain.model) else 'proxy'}`, or offer others with `--bits` "
            "and `--group-size`",
        )
    low, high = nearest_format(fitting, 2), nearest_format(fitting, 4)
    losses = importance_list(plain, low, high, trials, trials.store, progress)
    return correct_by_expert(table, trials.store, losses, low, high)


def nearest_format(specs: Sequence[QuantSpec], bitwidth: float) -> QuantSpec:
    """Return the format nearest to a bitwidth, preferably with groups of 64 columns.

    specs: formats below 16 bits.
    """
    return min(specs, key=lambda spec: (abs(spec.bitwidth - bitwidth), abs((spec.group_size or 512) - 64)))
