"""Measure a model: one sweep over its layers, then the prices of its units."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moec.evaluation.data import SplitData
from moec.manifests.progress import Progress

from ..bundle.plan_bundles import PlanBundles
from ..calibration.collect import unseen_notes
from ..preflight.kept_layers import runtime_bytes
from ..preflight.preparation import Prepared
from ..quantization.swept_store import SweptStore
from ..quantization.unit_store import UnitStore
from ..sensitivity.answer_walk import AnswerWalk, MeasureAnswers
from ..sensitivity.fisher import asks_gradients, predictions
from ..sensitivity.gradients import LayerGradients
from ..sensitivity.sensitivity import SensitivityTable, corrected_by_measurement, with_gradients
from ..sensitivity.trials import TaskData, Trials
from ..walker.loaded_layer import LoadedLayer
from .compile_context import Measured, Workbench
from .encode_texts import CompileTexts, compile_texts
from .sweep import Sweep, Swept, sweep_dense_probe


@dataclass(frozen=True, slots=True)
class _Passes:
    """The workbench of every pass over the layers."""

    bench: Workbench
    slot: LoadedLayer
    store: SweptStore
    texts: CompileTexts | None
    threads: int


def measure(bench: Workbench) -> Measured:
    """Calibrate, quantize every unit in every format, and predict what each format costs."""
    prepared = bench.prepared
    bundles = plan_bundles(bench)
    if prepared.request.options.target.kind == "loss":
        _require_baselines(bench, bundles)
    slot = LoadedLayer(prepared.lowering, prepared.kept_layers.count)
    store = SweptStore(prepared.lowering, prepared.request.options.quantizer, prepared.stored_specs, bench.journal)
    texts = compile_texts(prepared) if prepared.splits else None
    passes = _Passes(bench, slot, store, texts, torch.get_num_threads())
    swept = _swept(passes)
    prices = _with_gradients(passes, swept.sensitivity)
    progress = prepared.request.talk.progress("measuring plans by their KL")
    walk = None if texts is None else _answer_walk(passes, texts, swept, progress)
    trials = Trials(walk, bundles, store, task_data(prepared), progress, bench.journal)
    if texts is not None and prepared.request.options.sensitivity == "exact":
        exact_progress = prepared.request.talk.progress("measuring each expert alone")
        prices = corrected_by_measurement(prices, trials, prepared.plain_plan(), prepared.specs, exact_progress)
    return Measured(swept.statistics, store, trials, prices, texts, swept.held_out)


def plan_bundles(bench: Workbench) -> PlanBundles:
    """Return what opens the runtime on plans, on this machine or on workers."""
    prepared, request = bench.prepared, bench.prepared.request
    room = runtime_bytes(prepared.lowering.model, request.memory_limit_bytes)
    opens = request.open_runtime if bench.cluster is None else bench.cluster.open_runtime
    return PlanBundles(request, prepared.lowering, room, opens)


def task_data(prepared: Prepared) -> tuple[TaskData, ...]:
    """Return the validation items of each task, which trials measure."""

    def of(split: SplitData) -> TaskData:
        return TaskData(split.task, split.validation, len(split.test.items), prepared.shots[split.task.name])

    return tuple(map(of, prepared.splits))


def _require_baselines(bench: Workbench, bundles: PlanBundles) -> None:
    """Measure the unquantized model before the long stages: it may solve no item, so that nothing can be lost."""
    prepared = bench.prepared
    progress = prepared.request.talk.progress("measuring the checkpoint on validation items")
    store = UnitStore(prepared.lowering, prepared.request.options.quantizer)
    Trials(None, bundles, store, task_data(prepared), progress, bench.journal).require_baselines()


def _swept(passes: _Passes) -> Swept:
    bench, request = passes.bench, passes.bench.prepared.request
    probe = sweep_dense_probe(bench.prepared.dense_formats())
    elsewhere = None if bench.cluster is None else bench.cluster.quantize_experts
    sweep = Sweep(passes.slot, passes.store, bench.journal, probe, request.options.seed, elsewhere)
    title = "calibrating and quantizing" if passes.texts is not None else "quantizing"
    swept = sweep.run(passes.texts, passes.threads, request.talk.progress(title))
    if swept.statistics is not None:
        for note in unseen_notes(swept.statistics):
            request.talk.note(note)
    return swept


def _with_gradients(passes: _Passes, table: SensitivityTable) -> SensitivityTable:
    """Return the table with units priced by gradients on train texts, if the request asks for them."""
    bench, prepared, store = passes.bench, passes.bench.prepared, passes.store
    options = prepared.request.options
    if passes.texts is None or not asks_gradients(options.sensitivity, store.model):
        return table
    specs = store.priced_specs if prepared.prunes else store.specs
    elsewhere = None if bench.cluster is None else bench.cluster.price_experts
    gradients = LayerGradients(passes.slot, store, passes.texts.gradients, specs, bench.journal, elsewhere)
    progress = prepared.request.talk.progress("predicting what each unit costs")
    prices = gradients.run(options.seed, passes.threads, progress)
    if bench.cluster is not None:
        bench.cluster.forget_layers()
    return with_gradients(table, store, store.specs, predictions(prices, store.model, specs))


def _answer_walk(passes: _Passes, texts: CompileTexts, swept: Swept, progress: Progress) -> MeasureAnswers:
    """Return what measures answers under the weights of plans, on this machine or on workers."""
    cluster, kept_layers = passes.bench.cluster, passes.bench.prepared.kept_layers
    if cluster is not None:
        return cluster.measure_answers(texts.answers)
    lowering, layers = passes.bench.prepared.lowering, kept_layers.count
    keeps = kept_layers.holds_model
    make = (lambda: passes.slot) if keeps else (lambda: LoadedLayer(lowering, layers))
    return AnswerWalk(make, texts.answers, passes.threads, progress, swept.answers, keeps)
