"""How much each unit suffers in each format: predicted KL, from output errors and a few measured gains.

proxy: routing-weighted squared output error of the unit, times a gain measured per layer and projection (and per
group of dense weights) as KL at a probe format over the error there. exact: EdgeMoE's measurement, one expert at a
time, used to correct the proxy of each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from moec.manifests.errors import OptionError
from moec.manifests.model import PROJECTIONS, ExpertKey, ModelSpec, UnitKey
from moec.manifests.quant import FloatType, QuantSpec

from .options import Talk
from .plan import CompilePlan
from .search.baselines import fits_all, importance_list
from .trials import Trials
from .uniform import dense_spec
from .unit_store import UnitStore

Progress = Callable[[int, int], None]
# At 3 bits the KL of one projection of one layer stands clear of rounding, and still grows in proportion to the error.
PROBE_BITWIDTH = 3


@dataclass(frozen=True, slots=True)
class DenseGroup:
    """Dense weights that take one format together: attention of a layer, embedding, lm_head."""

    name: str
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SensitivityTable:
    """Predicted KL of every choice. loss of a unit in a format = gain[layer, projection] x correction[expert] x error.

    gains: [L, 3] in the order of PROJECTIONS. dense_gains: per group. corrections: [L, E], ones unless measured.
    """

    gains: np.ndarray
    dense_gains: Mapping[str, float]
    corrections: np.ndarray

    def unit_loss(self, store: UnitStore, unit: UnitKey, spec: QuantSpec) -> float:
        """Predicted KL in nats per token if only this unit is stored in this format."""
        gain = self.gains[unit.layer, PROJECTIONS.index(unit.projection)] * self.corrections[unit.layer, unit.expert]
        return float(gain) * store.error(unit, spec)

    def dense_loss(self, store: UnitStore, group: DenseGroup, specs: Mapping[str, QuantSpec]) -> float:
        """Predicted KL of one dense group."""
        return self.dense_gains[group.name] * sum(store.dense_error(name, specs[name]) for name in group.tensors)


def dense_groups(model: ModelSpec) -> tuple[DenseGroup, ...]:
    """All dense weights that may go below 16 bits, grouped."""
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
    """Everything at the checkpoint's own 16 bits."""
    units = dict.fromkeys(model.unit_keys(), spec_16bit)
    return CompilePlan(model, units, dict.fromkeys(model.dense_shapes(), spec_16bit), quantizer)


def measure_proxy(
    trials: Trials,
    plain: CompilePlan,
    unit_specs: Sequence[QuantSpec],
    dense_probe: Mapping[str, QuantSpec],
    progress: Progress,
) -> SensitivityTable:
    """Measure the gains: one KL per layer and projection, one per dense group that dense_probe puts below 16 bits.

    A projection that none of unit_specs below 16 bits fits has nothing to lose: its gain is 0.
    """
    model, store = plain.model, trials.store
    groups = [g for g in dense_groups(model) if any(dense_probe[name].bitwidth < 16 for name in g.tensors)]
    units = {(unit.layer, unit.projection) for unit in plain.units}
    total, done = len(units) + len(groups), 0
    gains = np.zeros((model.num_layers, len(PROJECTIONS)))
    for layer in model.expert_layers:
        for column, projection in enumerate(PROJECTIONS):
            if (layer, projection) not in units:
                continue
            done += 1
            columns = model.unit_shape(layer, projection)[1]
            fitting = [spec for spec in unit_specs if spec.bitwidth < 16 and spec.fits(columns)]
            if not fitting:
                continue
            probe = nearest_format(fitting, PROBE_BITWIDTH)
            own = [u for u in plain.units if u.layer == layer and u.projection == projection]
            plan = replace(plain, units={**plain.units, **dict.fromkeys(own, probe)})
            error = sum(store.error(unit, probe) for unit in own)
            kl = trials.kl(plan, f"sensitivity of layer {layer}, {projection}").mean
            gains[layer, column] = kl / error if error > 0 else 0.0
            progress(done, total)
    dense_gains = {group.name: 0.0 for group in dense_groups(model)}
    for group in groups:
        plan = replace(plain, dense={**plain.dense, **{name: dense_probe[name] for name in group.tensors}})
        error = sum(store.dense_error(name, dense_probe[name]) for name in group.tensors)
        kl = trials.kl(plan, f"sensitivity of {group.name}").mean
        dense_gains[group.name] = kl / error if error > 0 else 0.0
        done += 1
        progress(done, total)
    counts = max(layer.experts.count for layer in model.layers)
    return SensitivityTable(gains, dense_gains, np.ones((model.num_layers, counts)))


def correct_by_expert(
    table: SensitivityTable, store: UnitStore, measured: Mapping[ExpertKey, float], low: QuantSpec, high: QuantSpec
) -> SensitivityTable:
    """Scale each expert's prediction to its measured loss: that expert at `low`, the others at `high`.

    measured: increase of the loss over all experts at `high`, any unit; only the ratio between experts is used, within
    a factor of 4 either way, since single measurements are noisy.
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
    """Formats of all dense weights, one mapping per bitwidth on offer; norms and routers keep 16 bits in each."""
    shapes = plain.model.dense_shapes()
    return tuple(
        {name: dense_spec(name, shape, width, group_size, float_type) for name, shape in shapes.items()}
        for width in widths
    )


def measure_sensitivity(
    trials: Trials,
    plain: CompilePlan,
    unit_specs: Sequence[QuantSpec],
    dense_options: Sequence[Mapping[str, QuantSpec]],
    kind: Literal["exact", "proxy", "auto"],
    talk: Talk,
) -> SensitivityTable:
    """The table of this search. `auto` is the proxy, which takes a tenth of the measurements.

    Without data nothing is measured: all gains are 1, so plain weight errors decide.
    """
    counts = max(layer.experts.count for layer in plain.model.layers)
    if not trials.has_data:
        ones = np.ones((plain.model.num_layers, len(PROJECTIONS)))
        dense_gains = {group.name: 1.0 for group in dense_groups(plain.model)}
        return SensitivityTable(ones, dense_gains, np.ones((plain.model.num_layers, counts)))
    lowest = min(dense_options, key=lambda specs: min(spec.bitwidth for spec in specs.values()))
    table = measure_proxy(trials, plain, unit_specs, lowest, talk.progress("measuring sensitivity"))
    if kind != "exact":
        return table
    fitting = [spec for spec in unit_specs if spec.bitwidth < 16 and fits_all(plain, spec)]
    if not fitting:
        raise OptionError(
            "`--sensitivity exact` puts whole experts below 16 bits, and no format on offer fits all their matrices",
            "take `--sensitivity proxy`, or offer others with `--bits` and `--group-size`",
        )
    low, high = nearest_format(fitting, 2), nearest_format(fitting, 4)
    progress = talk.progress("measuring each expert alone")
    return correct_by_expert(
        table, trials.store, importance_list(plain, low, high, trials, trials.store, progress), low, high
    )


def nearest_format(specs: Sequence[QuantSpec], bitwidth: int) -> QuantSpec:
    """The format nearest to a bitwidth; 64 columns a group where there is a choice. specs: below 16 bits."""
    return min(specs, key=lambda spec: (abs(spec.bitwidth - bitwidth), abs((spec.group_size or 512) - 64)))
