"""The compile, stage by stage. Each stage is a room of its own; this file only connects them.

preflight -> calibrate -> sensitivity -> search -> compare -> emit -> certify -> publish
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moec.evaluation.text_pairs import encode_pairs
from moec.manifests.bundle import PARTIAL_SUFFIX, BundleManifest
from moec.manifests.codec import canonical_json
from moec.manifests.errors import TargetUnreachable
from moec.manifests.model import UnitKey
from moec.manifests.progress import Progress
from moec.manifests.quant import QuantSpec

from .bundle.certify import MODES_ITEMS, certify_task
from .bundle.emit import cost_summary, emit, finish
from .bundle.quality import model_card, quality_report, unimportance_deciles
from .calibration.collect import ActivationStatistics, calibrate, calibration_summary, unseen_notes
from .calibration.tables import Tables
from .checkpoint.tokenizer import load_tokenizer
from .cluster.session import ClusterSession, cluster_session
from .families import TensorSource
from .preflight.device_fit import choose_objective, summarise_device
from .preflight.finished import complete_earlier_run, may_be_finished, note_certified
from .preflight.preparation import KL_ITEMS, prepare
from .quantization.quantized import LEFT_OUT
from .quantization.unit_store import UnitStore
from .reference.model import ReferenceModel
from .request.low_versions import with_low_versions
from .request.objective import byte_weights
from .request.options import UNIFORM_DENSE_BITS
from .request.plan import CompilePlan
from .request.ports import MeasureModes, UnpublishedBundle
from .request.request import CompileRequest
from .request.result import CompileResult, LossCurve
from .request.task_data import train_texts
from .request.uniform import uniform_plan, uniform_quantizer, uniform_spec
from .search.bisect import search
from .search.comparison import EVERY, Comparison, can_compare, compare_with_baselines, fitting_formats, left_out_note
from .search.comparison_budget import affordable_here
from .search.loss_curve import measure_curve
from .search.pruning import left_out_losses, with_pruning
from .search.space import build_space
from .search.swaps import SWAPS, Swaps
from .sensitivity.fisher import TEXTS, asks_gradients, in_turns, predict_units, predictions
from .sensitivity.sensitivity import measure_sensitivity
from .sensitivity.trials import TaskData, Trials
from .stage import Stage
from .walker import planning
from .walker.certificate import certify_layerwise
from .walker.gradients import LayerGradients, with_gradients
from .walker.plan_bundles import PlanBundles, clear_trials
from .walker.store import StreamedStore
from .walker.sweep import Sweep
from .walker.trials import StreamedTrials
from .workspace.durable import check_replaceable, disk_errors, publish_directory, recover_replaced
from .workspace.output_lock import hold_output
from .workspace.work_folder import check_partial, planning_journal, removed_on_failure, work_folder, work_journal


def compile_checkpoint(request: CompileRequest) -> CompileResult:
    """Run all stages. Afterwards `output` holds a complete bundle, or what it held before.

    Raises MoecError; with `resume` the stages of an interrupted run with the same inputs are taken over.
    """
    if request.plan_only:
        return _plan_only(request)
    with hold_output(request.output, request.disk, request.talk.note):
        return _compile(request)


def _plan_only(request: CompileRequest) -> CompileResult:
    """The plan, and the curve of a sweep. No bundle."""
    stage, output, note = Stage.of(prepare(request)), request.output, request.talk.note
    # What an interrupted compile left is read and added to.
    is_shared = request.resume and work_folder(output).is_dir()
    held = hold_output(output, request.disk, note) if is_shared else nullcontext()
    journal = planning_journal(output, stage.identity(), request.resume, note)
    with held, _workers(stage) as stage.cluster, journal as stage.journal:
        plan = _make_plan(stage)
        curve = _curve(stage) if request.sweep else None
    return CompileResult(None, plan, _quality(stage, plan, None), curve)


def _compile(request: CompileRequest) -> CompileResult:
    """All stages, with the output held."""
    output, disk = request.output, request.disk
    recover_replaced(disk, output)
    is_candidate = may_be_finished(request)
    if not is_candidate:
        check_replaceable(output, request.overwrite)
    partial = output.with_name(output.name + PARTIAL_SUFFIX)
    check_partial(partial)
    clear_trials(output, disk)
    stage = Stage.of(prepare(request))
    identity = stage.identity()
    if is_candidate:
        finished = complete_earlier_run(request, identity)
        if finished is not None:
            return finished
        check_replaceable(output, request.overwrite)
    journal = work_journal(output, identity, disk, request.resume, request.talk.note)
    with disk_errors(output.parent), _workers(stage) as stage.cluster, journal as stage.journal:
        disk.remove_tree(partial)
        plan = _make_plan(stage)
        with removed_on_failure(disk, partial):
            quality = _emit_and_certify(stage, plan, partial)
            note_certified(stage.journal, request, partial)
            publish_directory(disk, partial, output, request.overwrite)
        result = CompileResult(output, plan, quality)
        request.published(result)
    return result


def _workers(stage: Stage) -> AbstractContextManager[ClusterSession | None]:
    if stage.request.cluster is None:
        return nullcontext()
    return cluster_session(stage.request, stage.lowering, stage.specs if stage.is_layerwise else None)


def _check_weights(stage: Stage) -> None:
    """Read every weight once, one at a time: what is not finite is named before any work. Raises CheckpointError."""
    sources: list[TensorSource] = [*stage.lowering.dense.values(), *stage.lowering.units.values()]
    progress = stage.request.talk.progress("checking weights")
    for done, source in enumerate(sources, 1):
        stage.lowering.read(source)
        progress(done, len(sources))


# -- plan ------------------------------------------------------------------------------------------------------------


def _make_plan(stage: Stage) -> CompilePlan:
    options, plan = stage.request.options, _make_high_plan(stage)
    return plan if options.low_spec is None else with_low_versions(plan, options.low_spec)


def _make_high_plan(stage: Stage) -> CompilePlan:
    options, model = stage.request.options, stage.lowering.model
    if options.target.kind == "uniform":
        quantizer = uniform_quantizer(options)
        spec, dense = uniform_spec(options, stage.lowering), options.dense_bits or UNIFORM_DENSE_BITS
        plan = uniform_plan(
            model, spec.bitwidth, options.uniform_group, dense, stage.lowering.float_type, quantizer,
            options.is_uniform_symmetric and spec.bitwidth < 16, spec,
        )  # fmt: skip
        summarise_device(stage.request.profile, plan, stage.checkpoint.tokenizer_file_bytes)
        return plan
    if stage.journal is None:
        raise RuntimeError("a plan is made with a journal")
    if stage.is_layerwise:
        return _make_plan_layerwise(stage)
    trials = prepare_trials(stage)
    plan = _search(stage)
    summarise_device(stage.request.profile, plan, stage.checkpoint.tokenizer_file_bytes)
    if options.comparisons is not False and stage.splits and can_compare(plan, stage.specs):
        stage.comparison = _compare(stage, plan, trials)
    return plan if options.search == "knapsack" else _edgemoe_plan(stage, trials)


def _compare(stage: Stage, plan: CompilePlan, trials: Trials) -> Comparison:
    """What people would pick instead; on its own accord only what takes a third of what is measured, at most."""
    options, talk = stage.request.options, stage.request.talk
    chosen = EVERY
    if options.comparisons is None and options.search != "edgemoe":
        chosen = affordable_here(trials, fitting_formats(plan, stage.specs), options.target.kind == "loss")
    found = compare_with_baselines(plan, stage.specs, trials, trials.store, options.target, talk, chosen)
    if found.left_out:
        talk.note(left_out_note(found.left_out))
    return found


def prepare_trials(stage: Stage) -> Trials:
    """Load the model, calibrate it and quantize its units: afterwards plans can be measured."""
    options, moments = stage.request.options, None
    if stage.journal is None:
        raise RuntimeError("plans are measured with a journal")
    if stage.splits:
        _check_weights(stage)
        stage.request.talk.note("loading the reference model")
        stage.reference = ReferenceModel(stage.checkpoint.root)
        stage.statistics = _calibrate(stage)
        for note in unseen_notes(stage.statistics):
            stage.request.talk.note(note)
        moments = stage.statistics.second_moments
    stage.store = UnitStore(stage.lowering, moments, options.quantizer)
    data, progress = _task_data(stage), stage.request.talk.progress("measuring on validation items")
    if stage.cluster is None or stage.reference is None:
        stage.trials = Trials(stage.reference, stage.store, data, KL_ITEMS if data else 0, progress, stage.journal)
    else:
        stage.trials = stage.cluster.trials(stage.reference, stage.store, data, KL_ITEMS, progress, stage.journal)
    if options.target.kind == "loss":
        stage.trials.require_baselines()
    progress = stage.request.talk.progress(f"quantizing with {options.quantizer}")
    stage.store.prepare(stage.specs, progress, None if stage.cluster is None else stage.cluster.quantize)
    return stage.trials


def _make_plan_layerwise(stage: Stage) -> CompilePlan:
    """The same search on one sweep over the layers; a plan is measured by another."""
    options, talk, lowering, journal = stage.request.options, stage.request.talk, stage.lowering, stage.journal
    if journal is None:
        raise RuntimeError("a plan is made with a journal")
    inputs = stage.sweep_inputs()
    threads = torch.get_num_threads()
    elsewhere = None if stage.cluster is None else stage.cluster.quantize_experts
    progress = talk.progress("calibrating and quantizing layer by layer")
    found = Sweep(lowering, inputs, journal, threads, elsewhere).run(progress)
    stage.statistics, stage.store, stage.sensitivity = found.statistics, found.store, found.sensitivity
    stage.swept = inputs, found
    if asks_gradients(options.sensitivity, lowering.model):
        predicted = _predict_layerwise(stage, found.store)
        stage.sensitivity = with_gradients(found.sensitivity, found.store, predicted)
    for note in unseen_notes(found.statistics):
        talk.note(note)
    progress = talk.progress("measuring layer by layer")
    room = planning.runtime_bytes(lowering.model, stage.request.memory_limit_bytes)
    opens = stage.request.open_runtime if stage.cluster is None else stage.cluster.open_runtime
    bundles = PlanBundles(stage.request, stage.checkpoint, lowering, found.statistics, found.store, room, opens)
    tasks = _task_data(stage) if options.target.kind == "loss" else ()
    stage.trials = StreamedTrials(lowering, inputs, found, progress, journal, threads, tasks, bundles)
    stage.trials.require_baselines()
    plan = _search(stage)
    summarise_device(stage.request.profile, plan, stage.checkpoint.tokenizer_file_bytes)
    return plan


def _task_data(stage: Stage) -> tuple[TaskData, ...]:
    return tuple(
        TaskData(split.task, split.validation, len(split.test.items), stage.shots[split.task.name])
        for split in stage.splits
    )


def _curve(stage: Stage) -> LossCurve:
    """The fewest bytes at every loss of a sweep."""
    if stage.space is None or stage.trials is None or stage.store is None:
        raise RuntimeError("a sweep comes after a search")
    request = stage.request
    specs = () if request.options.comparisons is False or stage.is_layerwise else stage.specs
    if specs and request.options.comparisons is None:
        is_free = affordable_here(stage.trials, len(specs), is_loss=True) == EVERY
        specs = specs if is_free else ()
    return measure_curve(request.sweep, stage.space, stage.trials, stage.store, specs, _swaps(stage))


def _edgemoe_plan(stage: Stage, trials: Trials) -> CompilePlan:
    """The plan of EdgeMoE's own search, which then is the one that the report compares."""
    comparison = stage.comparison
    plan = None if comparison is None or comparison.edgemoe is None else comparison.edgemoe.plan
    if comparison is None or plan is None:
        raise TargetUnreachable(
            f"EdgeMoE's search has no plan that keeps {stage.request.options.target}", "take `--search knapsack`"
        )
    stage.comparison = replace(comparison, plan=plan, plan_kl=trials.kl(plan, "plan").mean)
    return plan


def _calibrate(stage: Stage) -> ActivationStatistics:
    """Statistics over the train items of all tasks, taken from the journal if they are there."""
    reference, talk = stage.reference, stage.request.talk
    if reference is None or stage.journal is None:
        raise RuntimeError("calibration needs the reference model and the journal")
    texts = [text for split in stage.splits for text in train_texts(split, stage.shots)]
    pairs = reference.encode_pairs(texts)
    seed, progress = stage.request.options.seed, talk.progress("calibrating")
    arrays = stage.journal.arrays("calibration", lambda: calibrate(reference, pairs, seed, None, progress).to_arrays())
    return ActivationStatistics.from_arrays(arrays)


def _search(stage: Stage) -> CompilePlan:
    options, talk, trials, store = stage.request.options, stage.request.talk, stage.trials, stage.store
    if trials is None or store is None or stage.journal is None:
        raise RuntimeError("the search comes after the trials are set up")
    plain, dense = stage.plain_plan(), stage.dense_formats()
    if stage.sensitivity is None:
        predict = partial(_predict_units, stage)
        stage.sensitivity = measure_sensitivity(trials, plain, stage.specs, dense, options.sensitivity, predict, talk)
    popularity = None if stage.statistics is None else stage.statistics.popularity
    tokenizer_bytes = stage.checkpoint.tokenizer_file_bytes
    reads = choose_objective(stage.request.profile, options.objective, plain, popularity, tokenizer_bytes)
    weights = byte_weights(stage.lowering.model, popularity, reads)
    stage.space = build_space(plain, store, stage.sensitivity, weights, stage.specs, dense)
    if stage.prunes:
        stage.space = with_pruning(stage.space, left_out_losses(store, stage.sensitivity, popularity), weights)
    return search(stage.space, trials, options.target, talk.note, _swaps(stage))


def _swaps(stage: Stage) -> Swaps:
    """A measurement of a plan layer by layer is a pass over the checkpoint: none unless asked for."""
    asked, default = stage.request.options.swaps, 0 if stage.is_layerwise else SWAPS
    return Swaps(default if asked is None else asked, stage.request.talk)


def _predict_units(stage: Stage, progress: Progress) -> Mapping[tuple[UnitKey, QuantSpec], float]:
    """The Fisher proxy on train texts."""
    reference, store = stage.reference, stage.store
    if reference is None or store is None or stage.journal is None:
        raise RuntimeError("predictions need the reference model and the unit store")
    texts = [reference.encode_pairs(train_texts(split, stage.shots)[:TEXTS]) for split in stage.splits]
    specs = (*stage.specs, LEFT_OUT) if stage.prunes else stage.specs
    return predict_units(reference, store, specs, texts, stage.request.options.seed, stage.journal, progress)


def _predict_layerwise(stage: Stage, store: StreamedStore) -> Mapping[tuple[UnitKey, QuantSpec], float]:
    """The Fisher proxy on train texts, a layer at a time."""
    if stage.journal is None:
        raise RuntimeError("predictions need the journal")
    tokenizer = load_tokenizer(stage.checkpoint.root)
    texts = [encode_pairs(tokenizer, train_texts(split, stage.shots)[:TEXTS]) for split in stage.splits]
    specs = (*store.specs, LEFT_OUT) if stage.prunes else store.specs
    threads, elsewhere = torch.get_num_threads(), None if stage.cluster is None else stage.cluster.price_experts
    gradients = LayerGradients(stage.lowering, store, specs, stage.journal, threads, elsewhere)
    progress = stage.request.talk.progress("predicting what each unit costs")
    found = gradients.run(in_turns(texts), stage.request.options.seed, progress)
    if stage.cluster is not None:
        stage.cluster.forget_layers()
    return predictions(found, store.model, specs)


# -- bundle ----------------------------------------------------------------------------------------------------------


def _emit_and_certify(stage: Stage, plan: CompilePlan, partial: Path) -> dict[str, Any]:
    request, store = stage.request, stage.store
    manifest = emit(
        stage.checkpoint,
        stage.lowering,
        plan,
        partial,
        device=summarise_device(request.profile, plan, stage.checkpoint.tokenizer_file_bytes),
        disk=request.disk,
        options={**request.options.to_plain(), "quantizer": plan.quantizer},
        calibration=None if stage.statistics is None else calibration_summary(stage.statistics, stage.splits),
        statistics=stage.statistics,
        packed_units=None if store is None else store.for_bundle,
        progress=request.talk.progress("writing the bundle"),
    )
    if stage.splits and stage.reference is not None:
        opened = request.open_runtime(partial, 0) if stage.cluster is None else stage.cluster.bundle(partial)
        with opened as engine:
            for split in stage.splits:
                task, reference = split.task, stage.reference if stage.trials is None else stage.trials.reference
                asked, options = (task, split.test, stage.shots[task.name]), request.options
                stage.certificates[task.name] = certify_task(
                    *asked, reference, engine, options.target, request.talk, options.confidence
                )
    if stage.swept is not None and isinstance(stage.trials, StreamedTrials):
        found = certify_layerwise(request, partial, stage.trials, stage.swept, stage.splits, stage.shots)
        stage.certificates, stage.divergences = found
    if request.measure_modes is not None and stage.splits:
        stage.modes = _measured_modes(stage, request.measure_modes, partial)
    quality = _quality(stage, plan, manifest)
    finish(partial, manifest, canonical_json(quality), model_card(manifest, quality).encode(), request.disk)
    return quality


def _measured_modes(stage: Stage, measure: MeasureModes, partial: Path) -> dict[str, Any]:
    """What lossy modes cost on the first task; layer by layer inside the memory of the compile."""
    task, items = stage.splits[0].task, stage.splits[0].test.items[:MODES_ITEMS]
    deciles = [] if stage.statistics is None else unimportance_deciles(stage.statistics.unimportance)
    room = planning.runtime_bytes(stage.lowering.model, stage.request.memory_limit_bytes) if stage.is_layerwise else 0
    return measure(UnpublishedBundle(partial, task, items, stage.shots[task.name], deciles, room))


def _quality(stage: Stage, plan: CompilePlan, manifest: BundleManifest | None) -> dict[str, Any]:
    tables = Tables.empty(plan.model) if stage.statistics is None else Tables.of(stage.statistics)
    return quality_report(
        plan=plan,
        target=stage.request.options.target,
        cost=cost_summary(plan, tables.popularity) if manifest is None else manifest.cost,
        certificates=stage.certificates,
        divergences=stage.divergences,
        comparison=stage.comparison,
        trials=[] if stage.trials is None else stage.trials.log,
        sensitivity=stage.sensitivity,
        statistics=stage.statistics,
        confidence=stage.request.options.confidence,
        modes=stage.modes,
    )
