"""From a checkpoint to a plan: measure, price, search, compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moec.manifests.errors import DoesNotFit, TargetUnreachable

from ..preflight.device_fit import choose_objective, summarise_device
from ..preflight.prepared import Prepared, may_compare
from ..request.plan import CompilePlan, LossCurve, with_low_versions
from ..request.targets import byte_weights
from ..request.uniform import fits_all, requested_plan
from ..search.bisect import candidates
from ..search.comparison import EVERY, Comparison, can_compare, compare_with_baselines, left_out_note, with_popularity
from ..search.comparison_budget import affordable_here
from ..search.loss_curve import measure_curve
from ..search.pruning import left_out_losses, with_pruning
from ..search.space import SearchSpace, build_space
from ..search.swaps import SWAPS, Swaps
from ..sensitivity.acceptance import LEVELS
from .compile_context import CompileContext, Measured, Planned, used_popularity, with_use_on_devices
from .measure import calibrate, measure


def make_plan(context: CompileContext) -> Planned:
    """Return the plan of the request, with low versions where they are asked for."""
    options = context.prepared.options
    is_searched = options.target.kind != "uniform"
    planned = plan_by_search(context) if is_searched else plan_by_request(context)
    low = options.low_spec
    if low is None:
        return planned
    safer = [(with_low_versions(plan, low, planned.store), comparison) for plan, comparison in planned.safer]
    return replace(planned, plan=with_low_versions(planned.plan, low, planned.store), safer=safer)


def plan_by_request(context: CompileContext) -> Planned:
    """Return the plan of a uniform target, calibrated if there is data."""
    prepared = context.prepared
    plan = requested_plan(prepared.options, prepared.lowering)
    check_device(prepared, plan)
    if prepared.splits:
        return Planned(plan, *calibrate(context))
    with_use_on_devices(prepared, None)
    return Planned(plan)


def plan_by_search(context: CompileContext) -> Planned:
    """Measure the model, price its units, search the fewest bytes, compare with what people would pick instead."""
    prepared, options = context.prepared, context.prepared.options
    measured = measure(context)
    space = open_space(prepared, measured)
    # EdgeMoE's search takes the formats of dense weights from the plan. If these are fixed, no other search is needed.
    searches = not options.is_edgemoe or len(space.dense_options) > 1
    safer = list[CompilePlan]()
    if searches:
        note, levels = prepared.talk.note, () if options.is_edgemoe else LEVELS[1:]
        plan, *safer = candidates(
            space,
            measured.trials,
            options.target,
            note,
            swaps(prepared),
            context.boundaries,
            levels,
            options.effort == "quick",
        )
        check_device(prepared, plan)
    else:
        plan = replace(space.plain, dense=space.dense_of([0] * len(space.groups)))
    comparison = compare(prepared, measured, plan, is_result=searches)
    if options.is_edgemoe:
        comparison = with_plan_of_edgemoe(prepared, measured, comparison)
        plan = comparison.plan
    fitting = [safe for safe in safer if _fits(prepared, safe)]
    compared = [(safe, None if comparison is None else _of_plan(comparison, measured, safe)) for safe in fitting]
    return Planned(plan, measured.statistics, measured.store, measured, space, comparison, compared)


def _fits(prepared: Prepared, plan: CompilePlan) -> bool:
    try:
        check_device(prepared, plan)
    except DoesNotFit:
        return False
    return True


def _of_plan(comparison: Comparison, measured: Measured, plan: CompilePlan) -> Comparison:
    """Return the comparison of another plan with the same baselines."""
    return replace(comparison, plan=plan, plan_kl=measured.trials.kl(plan, "safer").mean)


def make_curve(prepared: Prepared, planned: Planned, losses: Sequence[float]) -> LossCurve:
    """Return the fewest bytes at every loss of a sweep, from the measurements of a search."""
    space, measured, options = planned.space, planned.measured, prepared.options
    if space is None or measured is None:
        raise ValueError("a plan without a search has no curve")
    specs = prepared.specs if may_compare(options, prepared.kept_layers) else ()
    if specs and options.comparisons is None and affordable_here(measured.trials, len(specs), is_loss=True) != EVERY:
        specs = ()
    return measure_curve(losses, space, measured.trials, measured.store, specs, swaps(prepared))


def open_space(prepared: Prepared, measured: Measured) -> SearchSpace:
    """Return the choices of the search: bytes and predicted KL of each unit in each format."""
    options, plain = prepared.options, prepared.plain_plan()
    statistics, popularity = measured.statistics, used_popularity(prepared, measured.statistics)
    tokenizer_bytes = prepared.checkpoint.tokenizer_file_bytes
    reads = choose_objective(prepared.profile, options.objective, plain, popularity, tokenizer_bytes)
    weights = byte_weights(prepared.lowering.model, popularity, reads)
    prices, dense_options = measured.prices, measured.store.held_dense(prepared.dense_formats())
    space = build_space(plain, measured.store, prices, weights, prepared.specs, dense_options)
    if not prepared.prunes:
        return space
    calibrated = None if statistics is None else statistics.calibrated_tokens
    return with_pruning(space, left_out_losses(measured.store, prices, calibrated), weights)


def swaps(prepared: Prepared) -> Swaps:
    """Return how many swaps are tried. By default none where a plan takes long to measure."""
    count = prepared.options.swaps
    if count is None:
        count = SWAPS if prepared.kept_layers.has_cheap_plans else 0
    return Swaps(count, prepared.talk)


def check_device(prepared: Prepared, plan: CompilePlan) -> None:
    """Refuse a plan that the device cannot run. Raises DoesNotFit."""
    summarise_device(prepared.profile, plan, prepared.checkpoint.tokenizer_file_bytes)


def compare(prepared: Prepared, measured: Measured, plan: CompilePlan, is_result: bool) -> Comparison | None:
    """Compare the plan with baselines. By default only with those that add at most a third to all measurements.

    is_result: whether a search found the plan. Otherwise its KL is not measured.
    """
    options, talk = prepared.options, prepared.talk
    is_comparing = may_compare(options, prepared.kept_layers) or options.is_edgemoe
    if not prepared.splits or not is_comparing:
        return None
    if not can_compare(plan, prepared.specs):
        return None
    trials, chosen = measured.trials, EVERY
    if options.comparisons is None and not options.is_edgemoe:
        formats = sum(fits_all(plan, spec) for spec in prepared.specs)
        chosen = affordable_here(trials, formats, options.target.kind == "loss")
    comparison = compare_with_baselines(
        plan, prepared.specs, trials, trials.store, options.target, talk, chosen, is_result
    )
    if comparison.left_out:
        talk.note(left_out_note(comparison.left_out))
    return comparison


def with_plan_of_edgemoe(prepared: Prepared, measured: Measured, comparison: Comparison | None) -> Comparison:
    """Replace the plan by that of EdgeMoE's own search. Raises TargetUnreachable."""
    options, statistics = prepared.options, measured.statistics
    baseline = None if comparison is None else comparison.edgemoe
    if options.search == "edgemoe-popularity" and comparison is not None and statistics is not None:
        comparison = with_popularity(comparison, prepared.specs, measured.trials, options.target, statistics.popularity)
        baseline = comparison.by_popularity
    plan = None if baseline is None else baseline.plan
    if comparison is None or plan is None:
        raise TargetUnreachable(f"EdgeMoE's search has no plan that keeps {options.target}", "take `--search knapsack`")
    return replace(comparison, plan=plan, plan_kl=measured.trials.kl(plan, "plan").mean)
