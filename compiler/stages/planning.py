"""From a checkpoint to a plan: measure, price, search, compare."""

from __future__ import annotations

from dataclasses import replace

from moec.manifests.errors import TargetUnreachable

from ..preflight.device_fit import choose_objective, summarise_device
from ..preflight.kept_layers import may_compare
from ..preflight.preparation import Prepared
from ..request.low_versions import with_low_versions
from ..request.objective import byte_weights
from ..request.plan import CompilePlan
from ..request.result import LossCurve
from ..request.uniform import uniform_dense_spec, uniform_plan, uniform_quantizer, uniform_spec
from ..search.bisect import search
from ..search.boundary import Boundaries
from ..search.comparison import (
    EVERY,
    Comparison,
    can_compare,
    compare_with_baselines,
    fitting_formats,
    left_out_note,
    with_popularity,
)
from ..search.comparison_budget import affordable_here
from ..search.loss_curve import measure_curve
from ..search.pruning import left_out_losses, with_pruning
from ..search.space import SearchSpace, build_space
from ..search.swaps import SWAPS, Swaps
from .compile_context import CompileContext, Measured, Planned, Searched
from .measure import calibrate, measure


def make_plan(context: CompileContext) -> Planned:
    """Return the plan of the request, with low versions where they are asked for."""
    options = context.prepared.request.options
    is_searched = options.target.kind != "uniform"
    planned = plan_by_search(context) if is_searched else plan_by_request(context)
    if options.low_spec is None:
        return planned
    return replace(planned, plan=with_low_versions(planned.plan, options.low_spec))


def plan_by_request(context: CompileContext) -> Planned:
    """Return the plan of a uniform target, calibrated if there is data."""
    plan = plan_uniform(context.prepared)
    return Planned(plan, calibrated=calibrate(context) if context.prepared.splits else None)


def plan_uniform(prepared: Prepared) -> CompilePlan:
    """Give all units the format of the request. Nothing is searched."""
    options, lowering = prepared.request.options, prepared.lowering
    experts, dense = uniform_spec(options, lowering), uniform_dense_spec(options, lowering)
    plan = uniform_plan(lowering.model, experts, dense, lowering.float_type, uniform_quantizer(options))
    check_device(prepared, plan)
    return plan


def plan_by_search(context: CompileContext) -> Planned:
    """Measure the model, price its units, search the fewest bytes, compare with what people would pick instead."""
    prepared, options = context.prepared, context.prepared.request.options
    measured = measure(context)
    space = open_space(prepared, measured)
    shared = prepared.request.shared
    boundaries = None if shared is None else Boundaries(context.journal, shared.is_first)
    plan = search(space, measured.trials, options.target, prepared.request.talk.note, swaps(prepared), boundaries)
    check_device(prepared, plan)
    comparison = compare(prepared, measured, plan)
    if options.is_edgemoe:
        comparison = with_plan_of_edgemoe(prepared, measured, comparison)
        plan = comparison.plan
    return Planned(plan, Searched(measured, space, comparison))


def open_space(prepared: Prepared, measured: Measured) -> SearchSpace:
    """Return the choices of the search: bytes and predicted KL of each unit in each format."""
    options, plain = prepared.request.options, prepared.plain_plan()
    popularity = None if measured.statistics is None else measured.statistics.popularity
    tokenizer_bytes = prepared.checkpoint.tokenizer_file_bytes
    reads = choose_objective(prepared.request.profile, options.objective, plain, popularity, tokenizer_bytes)
    weights = byte_weights(prepared.lowering.model, popularity, reads)
    prices = measured.prices
    space = build_space(plain, measured.store, prices, weights, prepared.specs, prepared.dense_formats())
    if not prepared.prunes:
        return space
    return with_pruning(space, left_out_losses(measured.store, prices, popularity), weights)


def compare(prepared: Prepared, measured: Measured, plan: CompilePlan) -> Comparison | None:
    """Compare the plan with baselines. By default only with those that add at most a third to all measurements."""
    options, talk = prepared.request.options, prepared.request.talk
    is_comparing = may_compare(options, prepared.kept_layers.holds_model) or options.is_edgemoe
    if not prepared.splits or not is_comparing:
        return None
    if not can_compare(plan, prepared.specs):
        return None
    trials, chosen = measured.trials, EVERY
    if options.comparisons is None and not options.is_edgemoe:
        chosen = affordable_here(trials, fitting_formats(plan, prepared.specs), options.target.kind == "loss")
    found = compare_with_baselines(plan, prepared.specs, trials, trials.store, options.target, talk, chosen)
    if found.left_out:
        talk.note(left_out_note(found.left_out))
    return found


def with_plan_of_edgemoe(prepared: Prepared, measured: Measured, comparison: Comparison | None) -> Comparison:
    """Replace the searched plan by that of EdgeMoE's own search, and show its losses. Raises TargetUnreachable."""
    options, statistics = prepared.request.options, measured.statistics
    found = None if comparison is None else comparison.edgemoe
    if options.search == "edgemoe-popularity" and comparison is not None and statistics is not None:
        comparison = with_popularity(comparison, prepared.specs, measured.trials, options.target, statistics.popularity)
        found = comparison.by_popularity
    plan = None if found is None else found.plan
    if comparison is None or plan is None:
        raise TargetUnreachable(f"EdgeMoE's search has no plan that keeps {options.target}", "take `--search knapsack`")
    return replace(comparison, plan=plan, plan_kl=measured.trials.kl(plan, "plan").mean, shows_losses=True)


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


def swaps(prepared: Prepared) -> Swaps:
    """Return how many swaps are tried. By default none if memory does not hold the model: each reads the checkpoint."""
    count = prepared.request.options.swaps
    if count is None:
        count = SWAPS if prepared.kept_layers.holds_model else 0
    return Swaps(count, prepared.request.talk)


def check_device(prepared: Prepared, plan: CompilePlan) -> None:
    """Refuse a plan that the device cannot run. Raises DoesNotFit."""
    summarise_device(prepared.request.profile, plan, prepared.checkpoint.tokenizer_file_bytes)
