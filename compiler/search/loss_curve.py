"""The curve of a sweep: the fewest bytes at each of several losses, compared with the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moec.manifests.errors import TargetUnreachable
from moec.manifests.quant import QuantSpec

from ..quantization.unit_store import UnitStore
from ..request.plan import CompilePlan, CurvePoint, LossCurve
from ..request.targets import Target
from ..sensitivity.trials import Trials
from .bisect import search
from .comparison import can_compare, compare_with_baselines
from .knapsack import ChoiceTable
from .space import SearchSpace
from .swaps import Swaps

PER_LAYER = "one format per layer"


def measure_curve(
    losses: Sequence[float],
    space: SearchSpace,
    trials: Trials,
    store: UnitStore,
    specs: Sequence[QuantSpec],
    swaps: Swaps,
) -> LossCurve:
    """Search at every loss. A plan that several losses need is measured once.

    specs: formats on offer to baselines. Empty: no baselines.
    swaps: swaps of moec's own search.
    """
    return tuple(_point(loss, space, trials, store, specs, swaps) for loss in losses)


def _point(
    loss: float, space: SearchSpace, trials: Trials, store: UnitStore, specs: Sequence[QuantSpec], swaps: Swaps
) -> CurvePoint:
    target, talk = Target("loss", loss), swaps.talk
    talk.note(f"searching at {target}")
    plan = _search(space, trials, target, swaps)
    if plan is None:
        return CurvePoint(loss, None, {}, None, {})
    _, estimates = trials.accepts(plan, loss, "sweep")
    baselines: dict[str, int | None] = {}
    if specs and can_compare(plan, specs):
        talk.note(f"baselines at {target}")
        comparison = compare_with_baselines(plan, specs, trials, store, target, talk)
        for result in filter(None, (comparison.uniform, comparison.edgemoe, comparison.published)):
            baselines[result.name] = None if result.plan is None else result.plan.expert_packed_bytes
        layers = per_layer_space(space, plan)
        # Widths of projections may differ, so that no format fits a whole layer.
        has_formats = bool(np.isfinite(layers.table.costs).any(axis=1).all())
        layered = _search(layers, trials, target, Swaps(0, talk)) if has_formats else None
        baselines[PER_LAYER] = None if layered is None else layered.expert_packed_bytes
    return CurvePoint(loss, plan, estimates, trials.kl(plan, "sweep").mean, baselines)


def _search(space: SearchSpace, trials: Trials, target: Target, swaps: Swaps) -> CompilePlan | None:
    try:
        return search(space, trials, target, swaps.talk.note, swaps)
    except TargetUnreachable as error:
        swaps.talk.note(str(error))
        return None


@dataclass(frozen=True, slots=True)
class _LayerSpace(SearchSpace):
    """Rows are layers, and all units of a layer take one format. Dense weights are those of a plan."""

    def plan(self, choice: Sequence[int] | np.ndarray) -> CompilePlan:
        layers = dict(zip(self.plain.model.expert_layers, choice, strict=True))
        units = {unit: self.unit_specs[int(layers[unit.layer])] for unit in self.units}
        return replace(self.plain, units=units)


def per_layer_space(space: SearchSpace, plan: CompilePlan) -> SearchSpace:
    """Return the same knapsack with one choice per layer, and the dense formats of a plan."""
    space = space.without_pruning()
    rows = space.plain.model.expert_layers
    width = len(space.unit_specs)
    costs, losses = np.zeros((len(rows), width)), np.zeros((len(rows), width))
    row_of = {layer: row for row, layer in enumerate(rows)}
    for at, unit in enumerate(space.units):
        costs[row_of[unit.layer]] += space.table.costs[at, :width]
        losses[row_of[unit.layer]] += space.table.losses[at, :width]
    plain = replace(space.plain, dense=plan.dense)
    return _LayerSpace(plain, space.units, space.unit_specs, (), (), ChoiceTable(costs, losses))
