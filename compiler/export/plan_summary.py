"""An engine's plan as plain values, and sentences on what the engine cannot express."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from moec.manifests.model import UnitKey

from .coarse_plan import EnginePlan
from .engine_formats import GPTQMODEL, GPTQMODEL_BITS, LLAMA_CPP, MLX
from .engine_names import shares_gate_and_up
from .plan_cost import PlanCost

_PUBLISHED_PACKED = {
    LLAMA_CPP: "llama-quantize takes them with `--allow-requantize`",
    MLX: "mlx-lm keeps them as they are, so dequantize them first, with its `--dequantize`",
    GPTQMODEL: "give GPTQModel a 16-bit checkpoint",
}


def summary(plan: EnginePlan, cost: PlanCost | None) -> dict[str, Any]:
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
        "measured": None if cost is None else cost.to_json(),
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
