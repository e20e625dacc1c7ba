"""From a plan to a bundle: write, certify, report, complete."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from moec.manifests.bundle import BundleManifest
from moec.manifests.codec import canonical_json
from moec.manifests.hobbit_thresholds import calibrated_thresholds

from ..bundle.certify import MODES_ITEMS, certify
from ..bundle.emit import BundleContent, cost_summary, emit, finish
from ..bundle.quality import model_card, quality_report, unimportance_deciles
from ..calibration.collect import calibration_summary
from ..calibration.tables import Tables
from ..preflight.device_fit import summarise_device
from ..preflight.prepared import Prepared, measures_tasks
from ..quantization.own_codes import units_held_by
from ..request.ports import UnpublishedBundle
from ..search.space import expert_losses
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


def certify_bundle(context: CompileContext, planned: Planned, partial: Path) -> Certified:
    """Run the bundle on data that nothing else saw, learn from its routing, and measure its lossy modes."""
    certified, prepared, measured = Certified(), context.prepared, planned.measured
    if measured is not None and measured.texts is not None:
        measured.trials.close()
        with_tasks = measures_tasks(prepared.options, prepared.kept_layers.holds_model)
        splits = prepared.splits if with_tasks else ()
        held_out, states = measured.texts.held_out, measured.held_out_states
        certified = Certified(*certify(partial, context.bundles, held_out, states, splits, prepared.shots))
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
    )
    precision = prepared.checkpoint.precision
    if precision:
        own_codes = {"held": units_held_by(prepared.lowering, plan.units), "of": len(plan.units)}
        quality |= {"baseline_precision": precision, "own_codes": own_codes}
    if prepared.use is not None:
        quality |= {"use_on_devices": prepared.use.to_json()}
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
