"""A second, smaller version of each expert. A runtime can use it instead of a missing expert (dynamic precision)."""

from __future__ import annotations

import dataclasses

from moec.manifests.bundle import unit_offsets
from moec.manifests.errors import PlanError
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec

from ..quantization.unit_store import UnitStore
from .plan import CompilePlan


def with_low_versions(plan: CompilePlan, spec: QuantSpec, store: UnitStore | None = None) -> CompilePlan:
    """Return the plan with a version in this format for each expert that is larger than that version.

    store: knows which units the format does not hold. Their experts get no version. None: all are held.
    Raises PlanError if no expert is larger.
    """
    low: dict[UnitKey, QuantSpec] = {}
    for key in plan.model.expert_keys():
        units = plan.model.units_of(key)
        specs = {unit.projection: spec for unit in units}
        is_held = store is None or all(store.holds(unit, spec) for unit in units)
        if is_held and unit_offsets(plan.model, key.layer, specs)[1] < plan.expert_padded_bytes(key):
            low.update(dict.fromkeys(units, spec))
    if not low:
        raise PlanError(
            f"`--fallback-bits {spec.bitwidth}`: no expert is larger than its version in {spec}",
            "leave it out, or take fewer bits",
        )
    return dataclasses.replace(plan, low_units=low)
