"""Comparison of the plan with the baselines, at the target and at equal KL."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moec.manifests.model import ExpertKey
from moec.manifests.quant import QuantSpec

from ..quantization.unit_store import UnitStore
from ..request.options import Talk
from ..request.plan import CompilePlan
from ..request.targets import Target
from ..request.uniform import fits_all
from ..sensitivity.exact import importance_list
from ..sensitivity.trials import Trials
from .baselines import BaselineResult, TargetRule, best_uniform, bytes_at_kl, edgemoe, weighed_by_use
from .comparison_budget import BY_POPULARITY, BY_USE, EDGEMOE_BITWIDTHS, OURS, PUBLISHED, UNIFORM
from .loss_by_kl import LossByKl

EVERY = frozenset(BY_USE)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of the baselines.

    plan_kl: mean KL of the plan on the items of the trials, for comparison at equal KL.
    uniform, published, edgemoe: results, or None for a baseline that was left out.
    by_size: the target is in bytes, so all plans have about the same size and the gain is in the KL.
    losses: measured importance of each expert, by the name of EdgeMoE's baseline.
    by_popularity: EdgeMoE's search with losses weighed by use, or None if it was not asked for.
    """

    plan: CompilePlan
    plan_kl: float
    uniform: BaselineResult | None
    published: BaselineResult | None
    edgemoe: BaselineResult | None
    by_size: bool = False
    losses: Mapping[str, Mapping[ExpertKey, float]] = field(default_factory=dict)
    by_popularity: BaselineResult | None = None

    @property
    def left_out(self) -> list[str]:
        """Names of the baselines that were not measured."""
        named = {UNIFORM: self.uniform, PUBLISHED: self.published, OURS: self.edgemoe}
        return [name for name, result in named.items() if result is None]

    def to_json(self) -> dict[str, object]:
        """Return plain values. A gain is the share of the baseline's expert bytes that the plan saves, or None."""
        rows = []
        for result in (self.uniform, self.published, self.edgemoe, self.by_popularity):
            if result is None:
                continue
            at_kl = bytes_at_kl(result.frontier, self.plan_kl)
            size = None if result.plan is None else result.plan.expert_packed_bytes
            rows.append(
                {
                    **result.to_json(),
                    "gain_at_target": None if self.by_size else self._gain(size),
                    "bytes_at_equal_kl": at_kl,
                    "gain_at_equal_kl": self._gain(at_kl),
                }
            )
        return {
            "plan_kl": self.plan_kl,
            "baselines": rows,
            **({"left_out": self.left_out} if self.left_out else {}),
            **({"expert_losses": self._loss_tables()} if self.losses else {}),
        }

    def _loss_tables(self) -> dict[str, list[list[float]]]:
        """Return the losses of all experts [L][E], by the name of the baseline."""
        layers = range(self.plan.model.num_layers)
        return {
            name: [[loss for key, loss in sorted(losses.items()) if key.layer == layer] for layer in layers]
            for name, losses in self.losses.items()
        }

    def _gain(self, other_bytes: float | None) -> float | None:
        return None if not other_bytes else 1 - self.plan.expert_packed_bytes / other_bytes


def target_rule(trials: Trials, target: Target, budget_bytes: int, purpose: str, store: UnitStore | None) -> TargetRule:
    """Return the test of a target for plans of a baseline.

    purpose: name of the baseline in the log of the trials.
    store: quantized units of the plans. None: those of the trials.
    A loss is judged as in the search: with all plans of this baseline, by their KL.
    """
    relation = LossByKl(target.value, trials.certification_items)

    def keeps(plan: CompilePlan) -> bool:
        if target.kind == "loss":
            return relation.judge(trials, plan, purpose, store)[0]
        if target.kind == "kl":
            return trials.kl_bound(trials.kl(plan, purpose, store)) <= target.value
        return plan.expert_packed_bytes <= budget_bytes

    return TargetRule(keeps, is_in_bytes(target))


def is_in_bytes(target: Target) -> bool:
    """Return whether a target limits the bytes of routed experts."""
    return target.kind in ("size", "bits_per_weight")


def budget_bytes(plan: CompilePlan, target: Target) -> int:
    """Return the expert bytes that a target in bytes allows. For other targets: the bytes of the plan."""
    if target.kind == "size":
        return int(target.value)
    if target.kind == "bits_per_weight":
        return int(target.value * plan.expert_weights / 8)
    return plan.expert_packed_bytes


def compare_with_baselines(
    plan: CompilePlan,
    specs: Sequence[QuantSpec],
    trials: Trials,
    store: UnitStore,
    target: Target,
    talk: Talk,
    chosen: Collection[str] = EVERY,
    is_result: bool = True,
) -> Comparison:
    """Measure the best uniform format and EdgeMoE's search, as published and with moec's quantizer.

    chosen: names of the baselines to measure. EdgeMoE's search needs the best uniform format first.
    is_result: whether to measure the KL of the plan. Otherwise it is NaN, and the plan only tells dense formats.
    """
    specs = store.held_by_all(specs)
    plan_kl = trials.kl(plan, "plan").mean if is_result else math.nan
    size = budget_bytes(plan, target)
    by_size = is_in_bytes(target)
    if UNIFORM not in chosen:
        return Comparison(plan, plan_kl, None, None, None, by_size)
    talk.note("comparing with the best uniform format")
    uniform = best_uniform(plan, specs, trials, target_rule(trials, target, size, UNIFORM, None))
    results: dict[str, BaselineResult] = {}
    importance: dict[str, dict[ExpertKey, float]] = {}
    for name, (formats, used) in _edgemoe_formats(plan, uniform, specs, store).items():
        if name not in chosen or len(formats) < 2:
            continue
        progress = talk.progress(f"{name}: importance of each expert")
        lowest, second = sorted(formats)[:2]
        importance[name] = importance_list(plan, formats[lowest], formats[second], trials, used, progress)
        rule = target_rule(trials, target, size, name, used)
        results[name] = edgemoe(name, plan, formats, importance[name], trials, used, rule)
    return Comparison(plan, plan_kl, uniform, results.get(PUBLISHED), results.get(OURS), by_size, importance)


def with_popularity(
    comparison: Comparison, specs: Sequence[QuantSpec], trials: Trials, target: Target, popularity: NDArray[np.integer]
) -> Comparison:
    """Add EdgeMoE's search with our quantizer and losses weighed by use. The losses themselves are not measured again.

    popularity: tokens that chose the expert, [L, E].
    """
    if comparison.uniform is None or OURS not in comparison.losses:
        return comparison
    plan, store = comparison.plan, trials.store
    formats, used = _edgemoe_formats(plan, comparison.uniform, store.held_by_all(specs), store)[OURS]
    reads = [plan.model.reads_per_token(layer) for layer in range(plan.model.num_layers)]
    weighed = weighed_by_use(comparison.losses[OURS], popularity, reads)
    rule = target_rule(trials, target, budget_bytes(plan, target), BY_POPULARITY, used)
    return replace(comparison, by_popularity=edgemoe(BY_POPULARITY, plan, formats, weighed, trials, used, rule))


def _edgemoe_formats(
    plan: CompilePlan, uniform: BaselineResult, specs: Sequence[QuantSpec], store: UnitStore
) -> dict[str, tuple[dict[float, QuantSpec], UnitStore]]:
    """Return formats by bitwidth and quantized units for EdgeMoE's search, by the name of the baseline."""
    plain = next(spec for spec in [*specs, store.lowering.spec_16bit] if spec.bitwidth == 16)
    ours = offered_to_edgemoe(plan, specs, edgemoe_group_size(plan, uniform, specs)) | {16.0: plain}
    # Linear quantization, scale per channel by max-abs. Source: EdgeMoE, expert-wise bitwidth adaptation.
    rounded = UnitStore(store.lowering, "rtn")
    usable = rounded.held_by_all([QuantSpec(bits, 0, symmetric=True) for bits in EDGEMOE_BITWIDTHS])
    published = {spec.bitwidth: spec for spec in usable} | {16.0: plain}
    return {PUBLISHED: (published, rounded), OURS: (ours, store)}


def offered_to_edgemoe(plan: CompilePlan, specs: Sequence[QuantSpec], group_size: int) -> dict[float, QuantSpec]:
    """Return the formats below 16 bits, by bitwidth, that EdgeMoE's search takes from those on offer.

    For each bitwidth of EdgeMoE it is the nearest that fits every unit. Units are quantized in no other format.
    group_size: columns per scale to prefer. 8 bits may be on offer in wider groups alone.
    """
    fitting = [spec for spec in specs if spec.bitwidth < 16 and fits_all(plan, spec)]
    if not fitting:
        return {}

    def nearest(bitwidth: float) -> QuantSpec:
        distance = {spec: abs(spec.bitwidth - bitwidth) for spec in fitting}
        is_own = {spec: spec.is_mxfp4 or spec.symmetric for spec in fitting}  # holds the checkpoint's own codes
        return min(fitting, key=lambda spec: (distance[spec], spec.group_size != group_size, not is_own[spec]))

    return {spec.bitwidth: spec for spec in map(nearest, EDGEMOE_BITWIDTHS)}


def left_out_note(names: Sequence[str]) -> str:
    """Return a sentence about baselines that were not measured."""
    listed = " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"
    return (
        f"not compared with {listed}, which would take more than a third of what is measured: "
        "`moec compare` adds them, `--comparisons` measures them now"
    )


def can_compare(plan: CompilePlan, specs: Sequence[QuantSpec]) -> bool:
    """Return whether baselines exist: a format below 16 bits is on offer, and every unit fits one scale per row."""
    return any(spec.bitwidth < 16 for spec in specs) and fits_all(plan, QuantSpec(EDGEMOE_BITWIDTHS[0]))


def edgemoe_group_size(plan: CompilePlan, uniform: BaselineResult, specs: Sequence[QuantSpec]) -> int:
    """Return the group size of the best uniform format, so that EdgeMoE's search starts from the best one.

    If that format has 16 bits, or none keeps the target: the widest group that fits every unit.
    """
    if uniform.plan is not None:
        spec = next(iter(uniform.plan.units.values()))
        if spec.bitwidth < 16:
            return spec.group_size
    return max((spec.group_size for spec in specs if spec.bitwidth < 16 and fits_all(plan, spec)), default=0)
