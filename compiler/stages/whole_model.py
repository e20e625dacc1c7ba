"""Measure a model that fits in memory as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moec.manifests.model import UnitKey
from moec.manifests.progress import Progress
from moec.manifests.quant import QuantSpec

from ..bundle.certify import HeldOutTask, certify_task
from ..calibration.collect import ActivationStatistics, calibrate, unseen_notes
from ..families import Lowering, TensorSource
from ..preflight.preparation import KL_ITEMS, Prepared
from ..quantization.quantized import LEFT_OUT
from ..quantization.unit_store import UnitStore
from ..reference.model import ReferenceModel
from ..request.options import Talk
from ..request.task_data import train_texts
from ..sensitivity.fisher import TEXTS, predict_units
from ..sensitivity.sensitivity import SensitivityTable, measure_sensitivity
from ..sensitivity.trials import TaskData, Trials
from ..workspace.journal import Journal
from .workbench import Certified, Measured, Workbench


@dataclass(frozen=True, slots=True)
class WholeModel(Measured):
    """A model in memory. reference: computes with the weights of the checkpoint; None without data."""

    reference: ReferenceModel | None


def measure_whole(bench: Workbench) -> WholeModel:
    """Load the model, calibrate it and quantize its units."""
    prepared = bench.prepared
    options, talk = prepared.request.options, prepared.request.talk
    reference, statistics, moments = None, None, None
    if prepared.splits:
        _check_weights(prepared.lowering, talk)
        talk.note("loading the reference model")
        reference = ReferenceModel(prepared.checkpoint.root)
        statistics = _calibrate(prepared, reference, bench.journal)
        moments = statistics.second_moments
        for note in unseen_notes(statistics):
            talk.note(note)
    store = UnitStore(prepared.lowering, moments, options.quantizer)
    trials = _trials(bench, reference, store)
    if options.target.kind == "loss":
        trials.require_baselines()
    progress = talk.progress(f"quantizing with {options.quantizer}")
    store.prepare(prepared.specs, progress, None if bench.cluster is None else bench.cluster.quantize)
    return WholeModel(statistics, store, trials, reference)


def price_whole(bench: Workbench, measured: WholeModel) -> SensitivityTable:
    """Predict the KL of every unit in every format."""
    prepared = bench.prepared
    options, talk = prepared.request.options, prepared.request.talk
    predict = partial(_predict, bench, measured)
    plain, dense = prepared.plain_plan(), prepared.dense_formats()
    return measure_sensitivity(measured.trials, plain, prepared.specs, dense, options.sensitivity, predict, talk)


def certify_whole(bench: Workbench, measured: WholeModel, partial_bundle: Path) -> Certified:
    """Run the bundle on held-out items, next to the reference model."""
    prepared, request = bench.prepared, bench.prepared.request
    if measured.reference is None:
        return Certified()
    opened = request.open_runtime(partial_bundle, 0) if bench.cluster is None else bench.cluster.bundle(partial_bundle)
    tasks = {}
    with opened as engine:
        for split in prepared.splits:
            shots, options = prepared.shots[split.task.name], request.options
            tasks[split.task.name] = certify_task(
                HeldOutTask(split.task, split.test, shots),
                measured.trials.reference,
                engine,
                options.target,
                request.talk,
                options.confidence,
            )
    return Certified(tasks)


def task_data(prepared: Prepared) -> tuple[TaskData, ...]:
    """Return the validation items of each task, which trials measure."""
    return tuple(
        TaskData(split.task, split.validation, len(split.test.items), prepared.shots[split.task.name])
        for split in prepared.splits
    )


def _check_weights(lowering: Lowering, talk: Talk) -> None:
    """Read every weight once, to name one that is not finite before any work. Raises CheckpointError."""
    sources: list[TensorSource] = [*lowering.dense.values(), *lowering.units.values()]
    progress = talk.progress("checking weights")
    for done, source in enumerate(sources, 1):
        lowering.read(source)
        progress(done, len(sources))


def _calibrate(prepared: Prepared, reference: ReferenceModel, journal: Journal) -> ActivationStatistics:
    """Count over the train items of all tasks, or take the counts from the journal."""
    texts = [text for split in prepared.splits for text in train_texts(split, prepared.shots)]
    pairs = reference.encode_pairs(texts)
    seed, progress = prepared.request.options.seed, prepared.request.talk.progress("calibrating")
    arrays = journal.arrays("calibration", lambda: calibrate(reference, pairs, seed, None, progress).to_arrays())
    return ActivationStatistics.from_arrays(arrays)


def _trials(bench: Workbench, reference: ReferenceModel | None, store: UnitStore) -> Trials:
    """Return what measures plans, on this machine or on workers."""
    data, progress = task_data(bench.prepared), bench.prepared.request.talk.progress("measuring on validation items")
    if bench.cluster is None or reference is None:
        return Trials(reference, store, data, KL_ITEMS if data else 0, progress, bench.journal)
    return bench.cluster.trials(reference, store, data, KL_ITEMS, progress, bench.journal)


def _predict(bench: Workbench, measured: WholeModel, progress: Progress) -> Mapping[tuple[UnitKey, QuantSpec], float]:
    """Predict costs from gradients on train texts."""
    prepared, reference = bench.prepared, measured.reference
    if reference is None:
        raise ValueError("costs are predicted from data, and there is none")
    texts = [reference.encode_pairs(train_texts(split, prepared.shots)[:TEXTS]) for split in prepared.splits]
    specs = (*prepared.specs, LEFT_OUT) if prepared.prunes else prepared.specs
    seed = prepared.request.options.seed
    return predict_units(reference, measured.store, specs, texts, seed, bench.journal, progress)
