"""Measure a model that does not fit in memory: one layer at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from moec.evaluation.text_pairs import encode_pairs
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec

from ..calibration.collect import unseen_notes
from ..checkpoint.tokenizer import load_tokenizer
from ..quantization.quantized import LEFT_OUT
from ..request.task_data import train_texts
from ..sensitivity.fisher import TEXTS, asks_gradients, in_turns, predictions
from ..sensitivity.sensitivity import SensitivityTable
from ..walker import planning
from ..walker.certificate import certify_layerwise
from ..walker.gradients import LayerGradients, with_gradients
from ..walker.plan_bundles import PlanBundles
from ..walker.store import StreamedStore
from ..walker.sweep import Sweep, SweepInputs, SweepResult
from ..walker.trials import StreamedTrials
from .whole_model import task_data
from .workbench import Certified, Measured, Workbench


@dataclass(frozen=True, slots=True)
class SweptModel(Measured):
    """A model that passed through memory layer by layer.

    store: quantized units on disk.
    inputs, found: texts of the sweep, and its results.
    sensitivity: predicted KL of every unit in every format.
    """

    store: StreamedStore
    trials: StreamedTrials
    inputs: SweepInputs
    found: SweepResult
    sensitivity: SensitivityTable


def measure_layer_by_layer(bench: Workbench) -> SweptModel:
    """Calibrate and quantize in one sweep over the layers. A plan is measured by another one."""
    prepared, talk = bench.prepared, bench.prepared.request.talk
    request, lowering, threads = prepared.request, prepared.lowering, torch.get_num_threads()
    inputs = prepared.sweep_inputs()
    elsewhere = None if bench.cluster is None else bench.cluster.quantize_experts
    progress = talk.progress("calibrating and quantizing layer by layer")
    found = Sweep(lowering, inputs, bench.journal, threads, elsewhere).run(progress)
    sensitivity = found.sensitivity
    if asks_gradients(request.options.sensitivity, lowering.model):
        sensitivity = with_gradients(sensitivity, found.store, _predict(bench, found.store))
    for note in unseen_notes(found.statistics):
        talk.note(note)
    progress = talk.progress("measuring layer by layer")
    room = planning.runtime_bytes(lowering.model, request.memory_limit_bytes)
    opens = request.open_runtime if bench.cluster is None else bench.cluster.open_runtime
    bundles = PlanBundles(request, prepared.checkpoint, lowering, found.statistics, found.store, room, opens)
    tasks = task_data(prepared) if request.options.target.kind == "loss" else ()
    trials = StreamedTrials(lowering, inputs, found, progress, bench.journal, threads, tasks, bundles)
    trials.require_baselines()
    return SweptModel(found.statistics, found.store, trials, inputs, found, sensitivity)


def certify_layer_by_layer(bench: Workbench, measured: SweptModel, partial_bundle: Path) -> Certified:
    """Measure KL on held-out answers, or the task if the target is a loss."""
    prepared, swept = bench.prepared, (measured.inputs, measured.found)
    tasks, divergences = certify_layerwise(
        prepared.request, partial_bundle, measured.trials, swept, prepared.splits, prepared.shots
    )
    return Certified(tasks, divergences)


def _predict(bench: Workbench, store: StreamedStore) -> Mapping[tuple[UnitKey, QuantSpec], float]:
    """Predict costs from gradients on train texts, a layer at a time."""
    prepared = bench.prepared
    tokenizer = load_tokenizer(prepared.checkpoint.root)
    texts = [encode_pairs(tokenizer, train_texts(split, prepared.shots)[:TEXTS]) for split in prepared.splits]
    specs = (*store.specs, LEFT_OUT) if prepared.prunes else store.specs
    threads, elsewhere = torch.get_num_threads(), None if bench.cluster is None else bench.cluster.price_experts
    gradients = LayerGradients(prepared.lowering, store, specs, bench.journal, threads, elsewhere)
    progress = prepared.request.talk.progress("predicting what each unit costs")
    found = gradients.run(in_turns(texts), prepared.request.options.seed, progress)
    if bench.cluster is not None:
        bench.cluster.forget_layers()
    return predictions(found, store.model, specs)
