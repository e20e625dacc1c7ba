"""From a plan to a bundle: write, certify, report, complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from moec.evaluation.results import finite
from moec.evaluation.statistics import ERROR
from moec.manifests.bundle import BundleManifest
from moec.manifests.codec import canonical_json
from moec.manifests.hobbit_thresholds import calibrated_thresholds

from ..bundle.certify import MODES_ITEMS, DivergenceCertificate, certify
from ..bundle.emit import BundleContent, cost_summary, emit, finish
from ..bundle.quality import model_card, overall_verdict, quality_report, unimportance_deciles
from ..calibration.collect import calibration_summary
from ..calibration.tables import Tables
from ..effort import QUICK_ITEMS
from ..preflight.device_fit import summarise_device
from ..preflight.prepared import Prepared, measures_tasks
from ..quantization.own_codes import units_held_by, units_with_rounded_scales
from ..request.plan import CompilePlan
from ..request.ports import UnpublishedBundle
from ..request.targets import Target
from ..search.pruning import kl_by_part
from ..search.space import expert_losses
from ..sensitivity.acceptance import LEVELS
from .compile_context import Certified, CompileContext, Planned, used_tables
from .learning import learn


def write_bundle(prepared: Prepared, planned: Planned, partial: Path) -> BundleManifest:
    """Write the files and an uncertified manifest. The runtime can open the folder from here on."""
    profile, plan, statistics = prepared.profile, planned.plan, planned.statistics
    content = BundleContent(
        plan=plan,
        device=summarise_device(profile, plan, prepared.checkpoint.tokenizer_file_bytes),
        options={**prepared.options_plain(), "quantizer": plan.quantizer},
        calibration=None if statistics is None else calibration_summary(statistics, prepared.splits),
        tables=used_tables(prepared, statistics),
        # A probe varies. The machine that runs the bundle is asked instead.
        profile=None if profile.is_probed else profile,
    )
    return emit(
        prepared.lowering,
        content,
        partial,
        packed_units=None if planned.store is None else planned.store.for_bundle,
        disk=prepared.request.disk,
        progress=prepared.talk.progress("writing the bundle"),
    )


def write_certified(
    context: CompileContext, planned: Planned, partial: Path
) -> tuple[Planned, BundleManifest, Certified]:
    """Write and certify the plan. If it is not supported, write and certify the safer plans, until one is supported.

    Each test has a share of the error, so the error of the whole list is at most 5 %. If no plan is supported, the
    bundle is that of the first one whose measured loss is inside the target, or else of the last one.
    Returns the plan that was taken, the manifest of the bundle, and its measurements.
    Source: Wiens, A fixed sequence Bonferroni procedure, 2003, without the levels that an accepted plan hands on.
    """
    plans = [planned, *(replace(planned, plan=plan, comparison=comparison) for plan, comparison in planned.safer)]
    shares = [level.share for level in LEVELS] if len(plans) > 1 else [1.0]
    results, tested, talk = list[Certified](), list[dict[str, Any]](), context.prepared.talk
    for plan, share in zip(plans, shares, strict=False):
        manifest = write_bundle(context.prepared, plan, partial)
        results.append(_certified(context, plan, partial, share, is_last=len(tested) + 1 == len(plans)))
        tested.append(_tested(context.prepared.options.target, plan.plan, results[-1]))
        if tested[-1]["verdict"] == "supported" or len(plans) == 1:
            return plan, manifest, replace(results[-1], tested=tested if len(plans) > 1 else ())
        talk.note(_not_supported(tested[-1], len(tested) < len(plans)))
        context.prepared.request.disk.remove_tree(partial)
    is_met = [row["verdict"] == "met" for row in tested]
    at = is_met.index(True) if True in is_met else len(results) - 1
    manifest = write_bundle(context.prepared, plans[at], partial)
    result = _certified(context, plans[at], partial, shares[at], True) if results[at].is_cut else results[at]
    return plans[at], manifest, replace(result, tested=tested)


def _tested(target: Target, plan: CompilePlan, certified: Certified) -> dict[str, Any]:
    """Return the row of a tested plan in quality.json: of each task the loss or the KL, and the bound that decides."""
    error = ERROR * certified.share
    if target.kind == "kl":
        tasks = {name: task.divergence for name, task in certified.tasks.items()}
        measured = tasks | {name: answers.divergence for name, answers in certified.divergences.items()}
        values = {name: divergence.mean for name, divergence in measured.items()}
        width = NormalDist().inv_cdf(1 - error)
        bounds = {name: finite(each.mean + width * each.standard_error) for name, each in measured.items()}
    else:
        losses = {name: task.loss for name, task in certified.tasks.items() if task.loss is not None}
        values = {name: loss.loss for name, loss in losses.items()}
        bounds = {name: finite(loss.deciding[1]) for name, loss in losses.items()}
    return {
        "expert_packed_bytes": plan.expert_packed_bytes,
        "bits_per_weight": plan.bits_per_weight,
        "share_of_error": certified.share,
        "losses" if target.kind == "loss" else "kl": values,
        "bounds": bounds,
        "verdict": overall_verdict(target, certified.tasks, certified.divergences, certified.share),
    }


def _not_supported(tested: dict[str, Any], has_more: bool) -> str:
    in_percent = "losses" in tested
    said = []
    for name, value in tested["losses" if in_percent else "kl"].items():
        bound = tested["bounds"][name]
        bound_text = "unknown" if bound is None else f"{bound:.2%}" if in_percent else f"{bound:.4g}"
        said.append(f"{name} {value:.2%}, bound {bound_text}" if in_percent else f"KL {value:.4g}, bound {bound_text}")
    further = "the next plan of the list is tested" if has_more else "no further plan is left"
    measured = f"are not supported on held-out items ({', '.join(said)})"
    return f"{tested['bits_per_weight']:.3f} bits per weight {measured}: {further}"


def _certified(context: CompileContext, planned: Planned, partial: Path, share: float, is_last: bool) -> Certified:
    """Run the bundle on data that nothing else saw.

    is_last: tasks are measured whatever the KL is. Otherwise only after a KL that a target of KL needs.
    """
    prepared, measured = context.prepared, planned.measured
    if measured is None or measured.texts is None:
        return Certified()
    measured.trials.close()
    target = prepared.options.target
    with_tasks = measures_tasks(prepared.options, prepared.kept_layers.holds_model)
    splits = prepared.splits if with_tasks else ()
    if prepared.options.effort == "quick":
        splits = tuple(replace(split, test=split.test.limit(QUICK_ITEMS, prepared.options.seed)) for split in splits)
    held_out, states = measured.texts.held_out, measured.held_out_states

    is_early = prepared.options.confidence is not None or not prepared.kept_layers.has_cheap_plans

    def refuses(divergences: Mapping[str, DivergenceCertificate]) -> bool:
        is_decided_by_kl = target.kind == "kl" and not is_last
        return is_decided_by_kl and overall_verdict(target, {}, divergences, share) != "supported"

    tasks, divergences = certify(
        partial,
        context.bundles,
        held_out,
        states,
        splits,
        prepared.shots,
        share,
        is_early,
        prepared.torch_device,
        refuses,
    )
    return Certified(tasks, divergences, share=share, is_cut=bool(splits) and not tasks)


def complete_measurements(context: CompileContext, planned: Planned, certified: Certified, partial: Path) -> Certified:
    """Learn from the routing of the bundle, and measure its lossy modes."""
    prepared = context.prepared
    files, reports = learn(context, planned.plan, partial)
    measure_modes, modes = prepared.request.measure_modes, None
    if measure_modes is not None and prepared.splits:
        modes = measure_modes(_unpublished(prepared, planned, partial))
    return replace(certified, files=files, reports=reports, modes=modes)


def report(
    prepared: Prepared, planned: Planned, certified: Certified, manifest: BundleManifest | None
) -> dict[str, Any]:
    """Return the content of quality.json. manifest: None for a plan that was not written."""
    plan, statistics, measured, options = planned.plan, planned.statistics, planned.measured, prepared.options
    tables = used_tables(prepared, statistics) or Tables.empty(plan.model)
    quality = quality_report(
        plan,
        options.target,
        cost_summary(plan, tables.popularity) if manifest is None else manifest.cost,
        confidence=options.confidence,
        certificates=certified.tasks,
        divergences=certified.divergences,
        comparison=planned.comparison,
        trials=[] if measured is None else measured.trials.log,
        sensitivity=None if measured is None else measured.prices,
        losses=None if planned.space is None else expert_losses(planned.space),
        statistics=statistics,
        modes=certified.modes,
        share=certified.share,
    )
    precision = prepared.checkpoint.precision
    if precision:
        own_codes = {"held": units_held_by(prepared.lowering, plan.units), "of": len(plan.units)}
        if rounded := units_with_rounded_scales(prepared.lowering, plan.units):
            own_codes["rounded_scales"] = rounded
        quality |= {"baseline_precision": precision, "own_codes": own_codes}
    if prepared.use is not None:
        quality |= {"use_on_devices": prepared.use.to_json()}
    if planned.space is not None and measured is not None and measured.texts is not None:
        parts, known = kl_by_part(planned.space, plan), measured.trials.known_kl(plan)
        quality |= {"kl_by_part": {"predicted": parts, "validation_kl": known}}
    if certified.tested:
        quality |= {"tested": list(certified.tested)}
    return {**quality, **certified.reports}


def complete_bundle(
    prepared: Prepared, manifest: BundleManifest, certified: Certified, quality: dict[str, Any], partial: Path
) -> None:
    """Add quality.json, the card with its pictures, what was learned, the self-test.

    Write the manifest again with `certified: true`.
    """
    pictures = prepared.request.draw_card(manifest, quality)
    card = model_card(manifest, quality, {picture.name: picture.title for picture in pictures}).encode()
    further = {**certified.files, **{picture.name: picture.data for picture in pictures}}
    finish(partial, manifest, canonical_json(quality), card, prepared.request.disk, further)


def _unpublished(prepared: Prepared, planned: Planned, partial: Path) -> UnpublishedBundle:
    """Return what lossy modes are measured on: the first task, and the memory that the compile leaves."""
    statistics, split = planned.statistics, prepared.splits[0]
    deciles = [] if statistics is None else unimportance_deciles(statistics.unimportance)
    items, shots = split.test.sample(MODES_ITEMS, prepared.options.seed), prepared.shots[split.task.name]
    thresholds = [] if statistics is None else calibrated_thresholds(statistics.unimportance.sum(axis=0).tolist())
    return UnpublishedBundle(partial, split.task, items, shots, deciles, prepared.runtime_bytes, thresholds)
