"""The measured cost of another engine's plan: its KL in our formats, next to the KL of the bundle on the same items.

Each matrix is quantized by our quantizer in the stand-in of the engine's format. The engine's own quantizer differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from moec.evaluation.statistics import DistributionSummary, LossEstimate
from moec.manifests.errors import OptionError
from moec.manifests.quant import QuantSpec

from ..measured_bundle import BundleRequest, opened_measurement
from ..preflight.finished import plan_of
from ..quantization.quantizers import PACKAGES
from ..request.options import Sensitivity
from ..request.plan import CompilePlan
from ..request.targets import Target
from ..sensitivity.trials import Trials
from ..stages.compile_context import Measured
from ..stages.measure import measure
from .coarse_plan import EnginePlan, coarse_plan, stack_formats
from .engine_formats import GPTQMODEL

COST_SUFFIX = ".plan-cost"
BY_BITS = "by the bits of the bundle"
BY_PREDICTIONS = "by predicted losses"


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A measured plan.

    expert_bytes: bytes of its experts in our formats.
    kl: KL to the checkpoint on the answers of the validation items, nats per token.
    losses: for a loss target, relative loss by task on the validation items.
    """

    expert_bytes: int
    kl: DistributionSummary
    losses: dict[str, LossEstimate] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return plain values."""
        losses = {task: loss.to_json() for task, loss in self.losses.items()}
        return {"expert_packed_bytes": self.expert_bytes, "kl": self.kl.to_json(), "losses": losses}


@dataclass(frozen=True, slots=True)
class PlanCost:
    """The cost of an engine's plan.

    items: number of validation items of a KL.
    bundle: the bundle's own plan.
    plan: the engine's plan.
    tried: KL of each way to choose the formats of stacks. The least one decides.
    """

    items: int
    bundle: MeasuredPlan
    plan: MeasuredPlan
    tried: dict[str, float]

    def to_json(self) -> dict[str, object]:
        """Return plain values."""
        measured = {"bundle": self.bundle.to_json(), "plan": self.plan.to_json()}
        return {"items": self.items, **measured, "tried": self.tried}


def measured_plan(engine: str, request: BundleRequest) -> tuple[EnginePlan, PlanCost]:
    """Return the plan of least measured KL for an engine, and its cost.

    Raises OptionError if the engine does not know the family, or if another package quantized the bundle.
    Raises the errors of `opened_measurement`.
    """
    plan = plan_of(request.manifest)
    by_bits = coarse_plan(engine, plan)
    if plan.quantizer in PACKAGES:
        raise OptionError(
            f"`{request.bundle}` was quantized by {plan.quantizer}, which does not have the formats that are measured",
            "leave out `--model` and `--data`: the plan is written without its cost",
        )
    recorded = request.manifest.options.get("sensitivity")
    sensitivity: Sensitivity = "proxy" if recorded == "proxy" else "auto"
    offered = _offered(engine, plan, by_bits)
    with opened_measurement(request, COST_SUFFIX, sensitivity, offered) as (context, _):
        return _least_kl(by_bits, measure(context), context.prepared.options.target)


def _offered(engine: str, plan: CompilePlan, by_bits: EnginePlan) -> tuple[QuantSpec, ...]:
    """Return the formats in which units are quantized: those of the bundle, and the stand-ins."""
    formats = by_bits.units.values() if engine == GPTQMODEL else stack_formats(engine, plan)
    specs = {spec for spec in plan.units.values() if not spec.is_pruned} | {
        engine_format.stand_in for engine_format in formats
    }
    columns = {plan.model.unit_shape(unit.layer, unit.projection)[1] for unit in plan.units}
    fitting = [spec for spec in specs if any(map(spec.fits, columns))]
    return tuple(sorted(fitting, key=lambda spec: (spec.bitwidth, -spec.group_size, str(spec))))


def _least_kl(by_bits: EnginePlan, measured: Measured, target: Target) -> tuple[EnginePlan, PlanCost]:
    """Measure the plan of the bundle and the engine's plans, and return the engine's plan of least KL."""
    engine, plan, trials = by_bits.engine, by_bits.plan, measured.trials
    plans = {BY_BITS: by_bits}
    if engine != GPTQMODEL:
        plans[BY_PREDICTIONS] = coarse_plan(engine, plan, partial(measured.prices.unit_loss, measured.store))
    ours = {name: engine_plan.in_our_formats() for name, engine_plan in plans.items()}
    bundle_kl, *kls = trials.kl_each([plan, *ours.values()], ["plan", *ours])
    tried = {name: kl.mean for name, kl in zip(ours, kls, strict=True)}
    best = min(tried, key=lambda name: tried[name])
    bundle = MeasuredPlan(plan.expert_packed_bytes, bundle_kl, _losses(measured.trials, target, plan))
    kl = dict(zip(ours, kls, strict=True))[best]
    chosen = MeasuredPlan(ours[best].expert_packed_bytes, kl, _losses(measured.trials, target, ours[best]))
    return plans[best], PlanCost(trials.kl_texts, bundle, chosen, tried)


def _losses(trials: Trials, target: Target, plan: CompilePlan) -> dict[str, LossEstimate]:
    """Return the losses on generated answers for a loss target. Other targets do not ask for them."""
    return trials.accepts(plan, target.value, "plan")[1] if target.kind == "loss" else {}
