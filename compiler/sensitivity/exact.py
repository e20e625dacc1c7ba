"""Sensitivity as EdgeMoE measures it, one expert at a time. Here it checks and corrects predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moec.manifests.model import ExpertKey
from moec.manifests.progress import Progress
from moec.manifests.quant import QuantSpec

from ..quantization.unit_store import UnitStore
from ..request.plan import CompilePlan
from ..request.uniform import uniform_like
from .trials import Trials

# Number of items in EdgeMoE's sensitivity measurement.
EXACT_ITEMS = 64


def importance_list(
    plan: CompilePlan, low: QuantSpec, high: QuantSpec, trials: Trials, store: UnitStore, progress: Progress
) -> dict[ExpertKey, float]:
    """Return the increase of answer NLL, in nats per token, if one expert is at `low` and all others at `high`.

    The baseline has all experts at `high`.
    Source: EdgeMoE, expert-wise bitwidth adaptation: one expert at INT2, the rest at INT4.
    """
    base = uniform_like(plan, high, store.quantizer)
    keys = plan.model.expert_keys()
    plans = [base, *(with_lowered_experts(base, [key], low) for key in keys)]
    before, *after = trials.answer_nll_each(plans, store, EXACT_ITEMS, progress)
    return {key: nll - before for key, nll in zip(keys, after, strict=True)}


def with_lowered_experts(base: CompilePlan, keys: Sequence[ExpertKey], lower: QuantSpec) -> CompilePlan:
    """Return the plan with all units of these experts in the format `lower`."""
    lowered = {unit: lower for key in keys for unit in base.model.units_of(key)}
    return replace(base, units={**base.units, **lowered})
