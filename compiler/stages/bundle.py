"""From a plan to a bundle: write, certify, report, complete."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from moec.manifests.bundle import BundleManifest
from moec.manifests.codec import canonical_json

from ..bundle.certificates import MODES_ITEMS
from ..bundle.certify import HeldOutAnswers, certify
from ..bundle.emit import BundleContent, cost_summary, emit, finish
from ..bundle.quality import Evidence, model_card, quality_report, unimportance_deciles, unimportance_quantiles
from ..calibration.collect import calibration_summary
from ..calibration.tables import Tables
from ..preflight.device_fit import summarise_device
from ..preflight.kept_layers import measures_tasks, runtime_bytes
from ..preflight.prepared import Prepared
from ..quantization.own_codes import units_held_by
from ..request.ports import UnpublishedBundle
from ..search.expert_losses import expert_losses
from .compile_context import Certified, CompileContext, Planned
from .learning import learn
from .measure import plan_bundles
from .used_experts import used_tables

HOBBIT_SHARES = (0.67, 0.97)
"""Shares of the chosen experts up to T1 and up to T2: 67 % high, 30 % low, 3 % skipped. Source: HOBBIT, evaluation."""


def write_bundle(prepared: Prepared, planned: Planned, partial: Path) -> BundleManifest:
    """Write the files and an uncertified manifest. The runtime can open the folder from here on."""
    request, plan, statistics = prepared.request, planned.plan, planned.statistics
    content = BundleContent(
        plan=plan,
        device=summarise_device(request.profile, plan, prepared.checkpoint.tokenizer_file_bytes),
        options={**prepared.options_plain(), "quantizer": plan.quantizer},
        calibration=None if statistics is None else calibration_summary(statistics, prepared.splits),
        statistics=used_tables(prepared, statistics),
        # A probe varies. The machine that runs the bundle is asked instead.
        profile=None if request.profile.is_probed else request.profile,
    )
    return emit(
        prepared.lowering,
        content,
        partial,
        packed_units=None if planned.store is None else planned.store.for_bundle,
        disk=request.disk,
        progress=request.talk.progress("writing the bundle"),
    )


def certify_bundle(context: CompileContext, planned: Planned, partial: Path) -> Certified:
    """Run the bundle on data that nothing else saw, learn from its routing, and measure its lossy modes."""
    certified, request = Certified(), context.prepared.request
    measured = None if planned.searched is None else planned.searched.measured
    if measured is not None and measured.texts is not None:
        held_out = {
            task: HeldOutAnswers(texts, measured.held_out_states[task])
            for task, texts in measured.texts.held_out.items()
        }
        measured.trials.close()
        with_tasks = measures_tasks(request.options, context.prepared.kept_layers.holds_model)
        splits = context.prepared.splits if with_tasks else ()
        tasks, divergences = certify(request, partial, plan_bundles(context), held_out, splits, context.prepared.shots)
        certified = Certified(tasks, divergences)
    certified = replace(certified, learned=learn(context, planned.plan, partial))
    if request.measure_modes is None or not context.prepared.splits:
        return certified
    modes = request.measure_modes(_unpublished(context.prepared, planned, partial))
    return replace(certified, modes=modes)


def report(
    prepared: Prepared, planned: Planned, certified: Certified, manifest: BundleManifest | None
) -> dict[str, Any]:
    """Return the content of quality.json. manifest: None for a plan that was not written."""
    plan, statistics, searched = planned.plan, planned.statistics, planned.searched
    tables = used_tables(prepared, statistics) or Tables.empty(plan.model)
    evidence = Evidence(
        certificates=certified.tasks,
        divergences=certified.divergences,
        comparison=None if searched is None else searched.comparison,
        trials=[] if searched is None else searched.measured.trials.log,
        sensitivity=None if searched is None else searched.measured.prices,
        expert_losses=None if searched is None else expert_losses(searched.space),
        statistics=statistics,
        modes=certified.modes,
    )
    options = prepared.request.options
    cost = cost_summary(plan, tables.popularity) if manifest is None else manifest.cost
    quality = quality_report(plan, options.target, cost, evidence, options.confidence)
    precision = prepared.checkpoint.precision
    if precision:
        held = {"held": units_held_by(prepared.lowering, plan.units), "of": len(plan.units)}
        quality |= {"baseline_precision": precision, "own_codes": held}
    if prepared.use is not None:
        quality |= {"use_on_devices": prepared.use.to_json()}
    quality |= certified.learned.reports
    return quality


def complete_bundle(
    prepared: Prepared, manifest: BundleManifest, certified: Certified, quality: dict[str, Any], partial: Path
) -> None:
    """Add quality.json, the card with its pictures, what was learned, the self-test.

    Write the manifest again with `certified: true`.
    """
    pictures = prepared.request.draw_card(manifest, quality)
    card = model_card(manifest, quality, {picture.name: picture.title for picture in pictures}).encode()
    further = {**certified.learned.files, **{picture.name: picture.data for picture in pictures}}
    finish(partial, manifest, canonical_json(quality), card, prepared.request.disk, further)


def _unpublished(prepared: Prepared, planned: Planned, partial: Path) -> UnpublishedBundle:
    """Return what lossy modes are measured on: the first task, and the memory that the compile leaves."""
    request, statistics, split = prepared.request, planned.statistics, prepared.splits[0]
    deciles = [] if statistics is None else unimportance_deciles(statistics.unimportance)
    room = runtime_bytes(prepared.lowering.model, request.memory_limit_bytes)
    items, shots = split.test.sample(MODES_ITEMS, prepared.request.options.seed), prepared.shots[split.task.name]
    published = [] if statistics is None else unimportance_quantiles(statistics.unimportance, HOBBIT_SHARES)
    return UnpublishedBundle(partial, split.task, items, shots, deciles, room, published)
