"""Sensitivity of each unit to each format: predicted KL.

- fisher: KL of a unit in a format to second order, from gradients (fisher.py).
- proxy: routing-weighted squared output error of the unit, times a gain. The gain is measured per layer and projection:
  KL at a probe format over the error there. Dense weights always use this, per group.
- exact: EdgeMoE's measurement, one expert at a time. It corrects the prediction of each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moec.manifests.errors import OptionError
from moec.manifests.model import PROJECTIONS, ExpertKey, ModelSpec, UnitKey
from moec.manifests.progress import Progress
from moec.manifests.quant import FloatType, QuantSpec

from ..quantization.unit_store import UnitStore
from ..request.options import Sensitivity, Talk
from ..request.plan import CompilePlan
from ..request.uniform import dense_spec, fits_all
from .exact import importance_list
from .fisher import asks_gradients, ranks_well
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
        """Return the predicted KL in nats per token if only this unit is stored in this format."""
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
    matrices = [name for name, shape in model.dense_shapes().items() if len(shape) == 2 and not name.endswith("router")]
    for layer in range(model.num_layers):
        own = [name for name in matrices if name.startswith(f"layers.{layer}.")]
        shared = tuple(name for name in own if ".shared_" in name)
        groups.append(DenseGroup(f"layers.{layer}.attention", tuple(name for name in own if name not in shared)))
        if shared:
            groups.append(DenseGroup(f"layers.{layer}.shared", shared))
    if not model.tie_embeddings:
        groups.append(DenseGroup("lm_head", ("lm_head",)))
    return tuple(groups)


def plain_plan(model: ModelSpec, spec_16bit: QuantSpec, quantizer: str) -> CompilePlan:
    """Return the plan with all weights at the checkpoint's own 16 bits."""
    units = dict.fromkeys(model.unit_keys(), spec_16bit)
    return CompilePlan(model, units, dict.fromkeys(model.dense_shapes(), spec_16bit), quantizer)


def measure_gains(
    trials: Trials, plain: CompilePlan, unit_specs: Sequence[QuantSpec], progress: Progress
) -> np.ndarray:
    """Return KL over output error of every projection of a layer at a probe format, [L, 3], with one measurement each.

    A projection without a fitting format below 16 bits has the gain 0.
    """
    model, store = plain.model, trials.store
    probes = {place: probed(plain, *place, unit_specs) for place in _places(model)}
    fitting = {place: (own, probe) for place, (own, probe) in probes.items() if probe is not None}

    def plans() -> Iterator[tuple[CompilePlan, str]]:
        for (layer, projection), (own, probe) in fitting.items():
            changed = replace(plain, units={**plain.units, **dict.fromkeys(own, probe)})
            yield changed, f"sensitivity of layer {layer}, {projection}"

    gains = np.zeros((model.num_layers, len(PROJECTIONS)))
    measured = zip(fitting.items(), trials.kl_each(plans()), strict=True)
    for done, (((layer, projection), (own, probe)), summary) in enumerate(measured, 1):
        error = sum(store.error(unit, probe) for unit in own)
        gains[layer, PROJECTIONS.index(projection)] = summary.mean / error if error > 0 else 0.0
        progress(done, len(fitting))
    return gains


def predicted_gains(
    plain: CompilePlan,
    store: UnitStore,
    unit_specs: Sequence[QuantSpec],
    predicted: Mapping[tuple[UnitKey, QuantSpec], float],
) -> np.ndarray:
    """Return the result of `measure_gains` if predictions were measurements, [L, 3]."""
    gains = np.zeros((plain.model.num_layers, len(PROJECTIONS)))
    for layer, projection in _places(plain.model):
        own, probe = probed(plain, layer, projection, unit_specs)
        if probe is not None:
            error, kl = sum(store.error(unit, probe) for unit in own), sum(predicted[(unit, probe)] for unit in own)
            gains[layer, PROJECTIONS.index(projection)] = kl / error if error > 0 else 0.0
    return gains


def _places(model: ModelSpec) -> list[tuple[int, str]]:
    """Return every projection of every routed layer. Experts without a gate have no gate here."""
    return [(layer, name) for layer in model.expert_layers for name in model.layers[layer].experts.projections]


def probed(
    plain: CompilePlan, layer: int, projection: str, unit_specs: Sequence[QuantSpec]
) -> tuple[list[UnitKey], QuantSpec | None]:
    """Return the units of one projection of a layer, and their probe format, None if no format below 16 bits fits."""
    own = [unit for unit in plain.units if unit.layer == layer and unit.projection == projection]
    columns = plain.model.unit_shape(layer, projection)[1]
    fitting = [spec for spec in unit_specs if spec.bitwidth < 16 and spec.fits(columns)]
    return own, nearest_format(fitting, PROBE_BITWIDTH) if fitting else None


def measure_dense_gains(
    trials: Trials, plain: CompilePlan, dense_probe: Mapping[str, QuantSpec], progress: Progress
) -> dict[str, float]:
    """Return KL over weight error of every dense group that `dense_probe` puts below 16 bits, one measurement each."""
    store, groups = trials.store, dense_groups(plain.model)
    gains = {group.name: 0.0 for group in groups}
    low = [group for group in groups if any(dense_probe[name].bitwidth < 16 for name in group.tensors)]

    def plans() -> Iterator[tuple[CompilePlan, str]]:
        for group in low:
            changed = replace(plain, dense={**plain.dense, **{name: dense_probe[name] for name in group.tensors}})
            yield changed, f"sensitivity of {group.name}"

    for done, (group, summary) in enumerate(zip(low, trials.kl_each(plans()), strict=True), 1):
        error = sum(store.dense_error(name, dense_probe[name]) for name in group.tensors)
        gains[group.name] = summary.mean / error if error > 0 else 0.0
        progress(done, len(low))
    return gains


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


Predict = Callable[[Progress], Mapping[tuple[UnitKey, QuantSpec], float]]


def measure_sensitivity(
    trials: Trials,
    plain: CompilePlan,
    unit_specs: Sequence[QuantSpec],
    dense_options: Sequence[Mapping[str, QuantSpec]],
    kind: Sensitivity,
    predict: Predict,
    talk: Talk,
) -> SensitivityTable:
    """Return the sensitivity table of this search.

    Without data nothing is measured: all gains are 1, so plain weight errors decide.
    kind: `auto` is `fisher`, or `proxy` where that ranks better. `exact` corrects the table by expert.
    predict: fisher.predict_units.
    """
    counts = max(layer.experts.count for layer in plain.model.layers)
    corrections = np.ones((plain.model.num_layers, counts))
    if not trials.has_data:
        ones = np.ones((plain.model.num_layers, len(PROJECTIONS)))
        return SensitivityTable(ones, {group.name: 1.0 for group in dense_groups(plain.model)}, corrections)
    predicted = None
    if not asks_gradients(kind, plain.model):
        gains = measure_gains(trials, plain, unit_specs, talk.progress("measuring sensitivity"))
    else:
        predicted = predict(talk.progress("predicting what each unit costs"))
        gains = predicted_gains(plain, trials.store, unit_specs, predicted)
    lowest = min(dense_options, key=lambda specs: min(spec.bitwidth for spec in specs.values()))
    progress = talk.progress("measuring sensitivity of dense weights")
    dense_gains = measure_dense_gains(trials, plain, lowest, progress)
    table = SensitivityTable(gains, dense_gains, corrections, predicted)
    if kind != "exact":
        return table
    fitting = [spec for spec in unit_specs if spec.bitwidth < 16 and fits_all(plain, spec)]
    if not fitting:
        raise OptionError(
            "`--sensitivity exact` puts whole experts below 16 bits, and no format on offer fits all their matrices",
            f"take `--sensitivity {'fisher' if ranks_well(plain.model) else 'proxy'}`, or offer others with `--bits` "
            "and `--group-size`",
        )
    low, high = nearest_format(fitting, 2), nearest_format(fitting, 4)
    progress = talk.progress("measuring each expert alone")
    return correct_by_expert(
        table, trials.store, importance_list(plain, low, high, trials, trials.store, progress), low, high
    )


def nearest_format(specs: Sequence[QuantSpec], bitwidth: float) -> QuantSpec:
    """Return the format nearest to a bitwidth, preferably with groups of 64 columns.

    specs: formats below 16 bits.
    """
    return min(specs, key=lambda spec: (abs(spec.bitwidth - bitwidth), abs((spec.group_size or 512) - 64)))
