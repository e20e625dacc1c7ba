"""The most precise plan on offer, tried before a search gives up."""

from __future__ import annotations

from collections.abc import Callable

from moec.manifests.errors import TargetUnreachable

from ..request.plan import CompilePlan
from .bracket import Found, least_plan
from .space import SearchSpace


def most_precise(space: SearchSpace, judged: Callable[[CompilePlan], tuple[bool, str]], wanted: str) -> Found:
    """Return the least lossy plan, if it keeps the target.

    judged: returns whether a plan keeps the target, and its measurement as text.
    wanted: the target as text.
    Raises TargetUnreachable otherwise.
    """
    plan, cost = least_plan(space, 0.0)
    accepted, measured = judged(plan)
    if not accepted:
        raise TargetUnreachable(
            f"no plan on offer keeps {wanted}; the most precise one, {plan.bits_per_weight:.2f} bits per weight, "
            f"{measured}",
            "allow more loss, or offer more bits with `--bits` and `--dense-bits`",
        )
    return Found(plan, 0.0, cost)
