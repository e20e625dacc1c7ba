"""Sensitivity as EdgeMoE measures it, one expert at a time. Here it checks and corrects predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import overload

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
    plans = LoweredPlans(base, low, 1 + len(keys), lambda at: keys[at - 1 : at] if at else ())
    before, *after = trials.answer_nll_each(plans, store, EXACT_ITEMS, progress)
    return {key: nll - before for key, nll in zip(keys, after, strict=True)}


class LoweredPlans(Sequence[CompilePlan]):
    """Plans in which some experts have a lower format. Each is made when it is asked for: thousands would fill memory.

    base: the plan of all others.
    count: number of plans.
    lowered: returns the lowered experts of a plan by its index.
    """

    def __init__(
        self, base: CompilePlan, lower: QuantSpec, count: int, lowered: Callable[[int], Sequence[ExpertKey]]
    ) -> None:
        self._base, self._lower, self._count, self._lowered = base, lower, count, lowered

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> CompilePlan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[CompilePlan]: ...
    def __getitem__(self, index: int | slice) -> CompilePlan | Sequence[CompilePlan]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(f"plan {index} of {self._count}")
        return with_lowered_experts(self._base, self._lowered(index % self._count), self._lower)


def with_lowered_experts(base: CompilePlan, keys: Sequence[ExpertKey], lower: QuantSpec) -> CompilePlan:
    """Return the plan with all units of these experts in the format `lower`."""
    lowered = {unit: lower for key in keys for unit in base.model.units_of(key)}
    return replace(base, units={**base.units, **lowered})
