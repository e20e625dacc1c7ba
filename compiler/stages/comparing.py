"""Compare a plan with what people would pick instead, and take EdgeMoE's own plan where it is asked for."""

from __future__ import annotations

from dataclasses import replace

from moec.manifests.errors import TargetUnreachable

from ..preflight.kept_layers import may_compare
from ..preflight.prepared import Prepared
from ..request.plan import CompilePlan
from ..request.uniform import fits_all
from ..search.comparison import (
    EVERY,
    Comparison,
    can_compare,
    compare_with_baselines,
    left_out_note,
    with_popularity,
)
from ..search.comparison_budget import affordable_here
from .compile_context import Measured


def compare(prepared: Prepared, measured: Measured, plan: CompilePlan) -> Comparison | None:
    """Compare the plan with baselines. By default only with those that add at most a third to all measurements."""
    options, talk = prepared.options, prepared.talk
    is_comparing = may_compare(options, prepared.kept_layers.holds_model) or options.is_edgemoe
    if not prepared.splits or not is_comparing:
        return None
    if not can_compare(plan, prepared.specs):
        return None
    trials, chosen = measured.trials, EVERY
    if options.comparisons is None and not options.is_edgemoe:
        formats = sum(fits_all(plan, spec) for spec in prepared.specs)
        chosen = affordable_here(trials, formats, options.target.kind == "loss")
    comparison = compare_with_baselines(plan, prepared.specs, trials, trials.store, options.target, talk, chosen)
    if comparison.left_out:
        talk.note(left_out_note(comparison.left_out))
    return comparison


def with_plan_of_edgemoe(prepared: Prepared, measured: Measured, comparison: Comparison | None) -> Comparison:
    """Replace the searched plan by that of EdgeMoE's own search. Raises TargetUnreachable."""
    options, statistics = prepared.options, measured.statistics
    baseline = None if comparison is None else comparison.edgemoe
    if options.search == "edgemoe-popularity" and comparison is not None and statistics is not None:
        comparison = with_popularity(comparison, prepared.specs, measured.trials, options.target, statistics.popularity)
        baseline = comparison.by_popularity
    plan = None if baseline is None else baseline.plan
    if comparison is None or plan is None:
        raise TargetUnreachable(f"EdgeMoE's search has no plan that keeps {options.target}", "take `--search knapsack`")
    return replace(comparison, plan=plan, plan_kl=measured.trials.kl(plan, "plan").mean)
