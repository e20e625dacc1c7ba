"""Measure a model: one sweep over its layers, then the prices of its units."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from moec.evaluation.data import SplitData
from moec.manifests.path_tables import why_no_paths
from moec.manifests.progress import Progress
from moec.manifests.quant import QuantSpec

from ..calibration.collect import ActivationStatistics, unseen_notes
from ..preflight.prepared import Prepared
from ..quantization.swept_store import SweptStore
from ..quantization.unit_store import UnitStore
from ..sensitivity.acceptance import changed_share
from ..sensitivity.answer_walk import AnswerMeter, AnswerWalk
from ..sensitivity.fisher import asks_gradients, predictions
from ..sensitivity.gradients import LayerGradients
from ..sensitivity.sensitivity import SensitivityTable, corrected_by_measurement, with_gradients
from ..sensitivity.trials import TaskData, Trials
from ..walker.loaded_layer import LoadedLayer
from .compile_context import CompileContext, Measured, with_use_on_devices
from .encode_texts import CompileTexts, encode_all_texts
from .sweep import Sweep, Swept, sweep_dense_probe

_MAX_UNHELD_NOTES = 5


@dataclass(frozen=True, slots=True)
class _Passes:
    """The needs of every pass over the layers: context, loaded layer, store of quantized units, texts and threads."""

    context: CompileContext
    slot: LoadedLayer
    store: SweptStore
    texts: CompileTexts | None
    threads: int


def measure(context: CompileContext) -> Measured:
    """Calibrate, quantize every unit in every format, and predict what each format costs."""
    prepared = context.prepared
    if prepared.options.target.kind == "loss" and prepared.options.effort != "quick":
        _require_baselines(context)
    slot = LoadedLayer(prepared.lowering, prepared.kept_layers.count, prepared.torch_device)
    store = SweptStore(prepared.lowering, prepared.options.quantizer, prepared.stored_specs, context.journal)
    texts = encode_all_texts(prepared) if prepared.splits else None
    passes = _Passes(context, slot, store, texts, torch.get_num_threads())
    swept = _swept(passes, sweep_dense_probe(store.held_dense(prepared.dense_formats())))
    prices = _with_gradients(passes, swept.sensitivity)
    progress = prepared.talk.progress("measuring plans by their KL")
    walk = None if texts is None else _answer_meter(passes, texts, swept, progress)
    held_out = [] if texts is None else [len(answers.counts) for answers in texts.held_out.values()]
    trials = Trials(
        walk, context.bundles, store, task_data(prepared, texts), prepared.talk.progress("measuring the tasks"),
        context.journal, context.decisions, held_out,
    )  # fmt: skip
    if texts is not None and prepared.options.sensitivity == "exact":
        exact_progress = prepared.talk.progress("measuring each expert alone")
        prices = corrected_by_measurement(prices, trials, prepared.plain_plan(), prepared.specs, exact_progress)
    return Measured(swept.statistics, store, trials, prices, texts, swept.held_out)


def calibrate(context: CompileContext) -> tuple[ActivationStatistics, SweptStore]:
    """Count what the train texts use, and quantize every unit in the format of a uniform target."""
    prepared = context.prepared
    store = SweptStore(prepared.lowering, prepared.options.quantizer, prepared.stored_specs, context.journal)
    texts = encode_all_texts(prepared)
    passes = _Passes(
        context,
        LoadedLayer(prepared.lowering, prepared.kept_layers.count, prepared.torch_device),
        store,
        replace(texts, validation=texts.validation.select([0]), held_out={}),  # only train texts count
        torch.get_num_threads(),
    )
    statistics = _swept(passes, {}).statistics
    if statistics is None:
        raise AssertionError("a sweep with texts counts them")
    return statistics, store


def task_data(prepared: Prepared, texts: CompileTexts | None = None) -> tuple[TaskData, ...]:
    """Return the validation items of each task, which trials measure, and the spare items of `texts`."""

    def of(split: SplitData) -> TaskData:
        name = split.task.name
        spare = () if texts is None else texts.spare.get(name, ())
        return TaskData(split.task, split.validation, len(split.test.items), prepared.shots[name], spare)

    return tuple(map(of, prepared.splits))


def _require_baselines(context: CompileContext) -> None:
    """Measure the unquantized model before the long stages: it may solve no item, so that nothing can be lost."""
    prepared = context.prepared
    progress = prepared.talk.progress("measuring the checkpoint on validation items")
    store = UnitStore(prepared.lowering, prepared.options.quantizer)
    tasks = task_data(prepared)
    trials = Trials(None, context.bundles, store, tasks, progress, context.journal, context.decisions)
    trials.require_baselines()
    for data in tasks:
        share = changed_share(data.task, trials.baseline(data).value, prepared.options.target, data.certification_items)
        if share is not None:
            prepared.talk.note(
                f"{data.task.name}: {data.certification_items} held-out items can support {prepared.options.target} "
                f"for a bundle that loses half of it, if at most {share:.1%} of the answers turn right or wrong"
            )


def _swept(passes: _Passes, probe: Mapping[str, QuantSpec]) -> Swept:
    """Pass all layers. probe: format of each dense weight in which its gain is measured."""
    context, prepared = passes.context, passes.context.prepared
    elsewhere = None if context.cluster is None else context.cluster.quantize_experts
    sweep = Sweep(passes.slot, passes.store, context.journal, probe, prepared.options.seed, elsewhere)
    title = "calibrating and quantizing" if passes.texts is not None else "quantizing"
    swept = sweep.run(passes.texts, passes.threads, prepared.talk.progress(title), prepared.options.path_keys)
    if swept.statistics is not None:
        for note in unseen_notes(swept.statistics):
            prepared.talk.note(note)
        if note := why_no_paths(prepared.lowering.model):
            prepared.talk.note(note)
    for note in _unheld_notes(passes.store):
        prepared.talk.note(note)
    return replace(swept, statistics=with_use_on_devices(prepared, swept.statistics))


def _unheld_notes(store: SweptStore) -> Iterator[str]:
    """Yield a note for each of the first matrices that formats on offer do not hold, and the number of the others."""
    unheld = store.unheld()
    for unit, specs in itertools.islice(unheld.items(), _MAX_UNHELD_NOTES):
        yield (
            f"tensor `{store.lowering.units[unit].name}` (expert {unit.expert} of layer {unit.layer}) exceeds the "
            f"float16 scales of {', '.join(map(str, specs))}: it keeps a wider format"
        )
    if len(unheld) > _MAX_UNHELD_NOTES:
        yield f"{len(unheld) - _MAX_UNHELD_NOTES} more expert projections exceed the scales of formats on offer"


def _with_gradients(passes: _Passes, table: SensitivityTable) -> SensitivityTable:
    """Return the table with units priced by gradients on train texts, if the request asks for them."""
    context, prepared, store = passes.context, passes.context.prepared, passes.store
    options = prepared.options
    if passes.texts is None or not asks_gradients(options.sensitivity, store.model):
        return table
    specs = store.priced_specs if prepared.prunes else store.specs
    elsewhere = None if context.cluster is None else context.cluster.price_experts
    gradients = LayerGradients(passes.slot, store, passes.texts.gradients, specs, context.journal, elsewhere)
    progress = prepared.talk.progress("predicting what each unit costs")
    prices = gradients.run(options.seed, passes.threads, progress)
    if context.cluster is not None:
        context.cluster.forget_layers()
    return with_gradients(table, store, store.specs, predictions(prices, store.model, specs))


def _answer_meter(passes: _Passes, texts: CompileTexts, swept: Swept, progress: Progress) -> AnswerMeter:
    """Return what measures answers under the weights of plans, on this machine or on workers."""
    cluster, kept_layers = passes.context.cluster, passes.context.prepared.kept_layers
    if cluster is not None:
        return cluster.measure_answers(texts.validation)
    lowering, layers, device = passes.context.prepared.lowering, kept_layers.count, passes.slot.device
    keeps = kept_layers.holds_model
    make = (lambda: passes.slot) if keeps else (lambda: LoadedLayer(lowering, layers, device))
    return AnswerWalk(make, texts.validation, passes.threads, progress, swept.answers, keeps)
