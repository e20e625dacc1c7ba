"""Another engine's plan as plain values: sizes, notes, and its measured cost.

The cost is its KL in our formats, next to the KL of the bundle on the same items.
Each matrix is quantized by our quantizer in the stand-in of the engine's format. The engine's own quantizer differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from moec.evaluation.statistics import DistributionSummary
from moec.manifests.errors import OptionError
from moec.manifests.model import UnitKey
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
from .engine_formats import GPTQMODEL, GPTQMODEL_BITS, LLAMA_CPP, MLX
from .engine_names import shares_gate_and_up

COST_SUFFIX = ".plan-cost"
BY_BITS = "by the bits of the bundle"
BY_PREDICTIONS = "by predicted losses"
_PUBLISHED_PACKED = {
    LLAMA_CPP: "llama-quantize takes them with `--allow-requantize`",
    MLX: "mlx-lm keeps them as they are, so dequantize them first, with its `--dequantize`",
    GPTQMODEL: "give GPTQModel a 16-bit checkpoint",
}


def measured_plan(engine: str, request: BundleRequest) -> tuple[EnginePlan, dict[str, Any]]:
    """Return the plan of least measured KL for an engine, and its cost as plain values.

    items: number of validation items of a KL.
    bundle, plan: bytes of the experts in our formats, KL, and losses by task, of the bundle's plan and the engine's.
    tried: KL of each way to choose the formats of stacks. The least one decides.

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


def _least_kl(by_bits: EnginePlan, measured: Measured, target: Target) -> tuple[EnginePlan, dict[str, Any]]:
    """Measure the plan of the bundle and the engine's plans, and return the engine's plan of least KL."""
    engine, plan, trials = by_bits.engine, by_bits.plan, measured.trials
    plans = {BY_BITS: by_bits}
    if engine != GPTQMODEL:
        plans[BY_PREDICTIONS] = coarse_plan(engine, plan, partial(measured.prices.unit_loss, measured.store))
    ours = {name: engine_plan.in_our_formats() for name, engine_plan in plans.items()}
    bundle_kl, *kls = trials.kl_each([plan, *ours.values()], ["plan", *ours])
    tried = {name: kl.mean for name, kl in zip(ours, kls, strict=True)}
    best = min(tried, key=lambda name: tried[name])
    bundle = _measured(plan, bundle_kl, trials, target)
    chosen = _measured(ours[best], dict(zip(ours, kls, strict=True))[best], trials, target)
    return plans[best], {"items": trials.kl_texts, "bundle": bundle, "plan": chosen, "tried": tried}


def _measured(plan: CompilePlan, kl: DistributionSummary, trials: Trials, target: Target) -> dict[str, Any]:
    """Return the measurements of a plan. A loss target asks for the losses on generated answers, too."""
    losses = trials.accepts(plan, target.value, "plan")[1] if target.kind == "loss" else {}
    return {
        "expert_packed_bytes": plan.expert_packed_bytes,
        "kl": kl.to_json(),
        "losses": {task: loss.to_json() for task, loss in losses.items()},
    }


def summary(plan: EnginePlan, cost: dict[str, Any] | None) -> dict[str, Any]:
    """Return the plan as plain values: formats by layer and projection with their number of experts, sizes, notes.

    cost: the measured cost, or None.
    """
    bundle = plan.plan
    return {
        "engine": plan.engine,
        "family": bundle.model.family,
        "layers": _layers(plan),
        "dense": {name: engine_format.name for name, engine_format in plan.dense.items()},
        "expert_bytes": plan.expert_bytes,
        "bits_per_weight": plan.bits_per_weight,
        "bundle_expert_bytes": bundle.expert_packed_bytes,
        "bundle_bits_per_weight": bundle.bits_per_weight,
        "left_out": len(plan.left_out),
        "notes": list(_notes(plan)),
        "measured": cost,
    }


def _layers(plan: EnginePlan) -> list[dict[str, Any]]:
    model, rows = plan.plan.model, []
    for layer in model.expert_layers:
        row: dict[str, Any] = {"layer": layer}
        for projection in model.layers[layer].experts.projections:
            experts = range(model.layers[layer].experts.count)
            names = (plan.units[UnitKey(layer, expert, projection)].name for expert in experts)
            row[projection] = dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))
        rows.append(row)
    return rows


def _notes(plan: EnginePlan) -> Iterator[str]:
    """Yield a sentence for each thing that the engine cannot express or needs."""
    engine, bundle = plan.engine, plan.plan
    if plan.left_out:
        place = "the smallest format of their layer" if engine == GPTQMODEL else "the format of their stack"
        count = len(plan.left_out)
        yield f"{count} experts that the bundle leaves out are kept in {place}: {engine} cannot leave any out"
    if bundle.low_experts:
        yield f"the second versions of {len(bundle.low_experts)} experts are left out: {engine} has one version of each"
    if bundle.model.family == "gpt_oss":
        yield f"published checkpoints of gpt-oss hold packed experts: {_PUBLISHED_PACKED[engine]}"
    important = sorted({engine_format.name for engine_format in plan.units.values() if engine_format.needs_importance})
    if important:
        yield f"llama-quantize needs importance data for {', '.join(important)}: add `--imatrix FILE`"
    yield from _size_notes(plan)


def _size_notes(plan: EnginePlan) -> Iterator[str]:
    """Yield why the experts take more bytes than in the bundle, if they do."""
    bundle_bytes, size = plan.plan.expert_packed_bytes, plan.expert_bytes
    if size <= bundle_bytes:
        return
    reason = f"{plan.engine} has no smaller formats for these matrices"
    if plan.engine == GPTQMODEL:
        reason = f"scales of GPTQ are wider{_raised(plan)}"
    yield f"the experts take {size / bundle_bytes - 1:.1%} more bytes than in the bundle: {reason}".replace("%", " %")


def _raised(plan: EnginePlan) -> str:
    """Return why matrices have more bits in GPTQModel than in the bundle, as further reasons."""
    specs = plan.plan.units.values()
    count = sum(not spec.is_pruned and spec.bitwidth < 16 and spec.bitwidth not in GPTQMODEL_BITS for spec in specs)
    wider = f", {count} matrices get the next larger bitwidth that GPTQModel has" if count else ""
    shared = ", gate and up of an expert share the larger format" if shares_gate_and_up(plan.plan.model.family) else ""
    present = ", experts that the bundle leaves out are kept" if plan.left_out else ""
    return wider + shared + present
