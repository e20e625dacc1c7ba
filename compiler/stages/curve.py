"""The curve of a sweep, from the measurements of a search."""

from __future__ import annotations

from ..preflight.kept_layers import may_compare
from ..request.result import LossCurve
from ..search.comparison import EVERY
from ..search.comparison_budget import affordable_here
from ..search.loss_curve import measure_curve
from .compile_context import CompileContext, Planned
from .planning import swaps


def make_curve(context: CompileContext, planned: Planned) -> LossCurve:
    """Return the fewest bytes at every loss of a sweep."""
    prepared, request = context.prepared, context.prepared.request
    if planned.searched is None:
        raise ValueError("a plan without a search has no curve")
    space, measured = planned.searched.space, planned.searched.measured
    specs = prepared.specs if may_compare(request.options, prepared.kept_layers.holds_model) else ()
    if specs and request.options.comparisons is None:
        is_affordable = affordable_here(measured.trials, len(specs), is_loss=True) == EVERY
        specs = specs if is_affordable else ()
    return measure_curve(request.sweep, space, measured.trials, measured.store, specs, swaps(prepared))
