"""How well each proxy ranks units: ``python bench/sensitivity.py``, two or three minutes on two cores.

Every projection of every expert of the shipped example is put into one format by itself, and the KL on validation
answers is measured: the exact sensitivity. Beside it what the proxies predict: the one from gradients (Fisher), the
one that measures a gain per layer and projection on the whole model, and the one of a compile layer by layer, with a
gain per layer on a few texts.
Prints Spearman's rank correlations, over all units and within layers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from moec.compiler.calibration import calibrate
from moec.compiler.checkpoint import open_checkpoint
from moec.compiler.durable import Disk
from moec.compiler.families import lower
from moec.compiler.fisher import TEXTS, predict_units
from moec.compiler.journal import Journal
from moec.compiler.layerwise.planning import sweep_inputs
from moec.compiler.layerwise.sweep import Sweep
from moec.compiler.reference import ReferenceModel
from moec.compiler.sensitivity import SensitivityTable, dense_formats, measure_gains, plain_plan
from moec.compiler.trials import TaskData, Trials
from moec.compiler.unit_store import UnitStore
from moec.evaluation.data import load_splits
from moec.manifests.quant import QuantSpec

KL_ITEMS = 128
CALIBRATION_ITEMS = 500


def silent(done: int, total: int) -> None:
    """No progress bar."""


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Correlation of ranks; there are no ties among measured errors."""
    ranks = [values.argsort().argsort() for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> None:
    """Read the command line, measure, print one JSON object."""
    parser = argparse.ArgumentParser(description="Rank correlation of the sensitivity proxies with exact measurement.")
    parser.add_argument("--model", default="examples/model")
    parser.add_argument("--data", default="examples/data/gsm8k")
    parser.add_argument("--bits", type=int, default=2)
    options = parser.parse_args()
    spec, probe_spec = QuantSpec(options.bits, 64), QuantSpec(3, 64)
    splits = load_splits(options.data, None)
    train = replace(splits, train=splits.train.limit(CALIBRATION_ITEMS, 0))
    lowering, reference = lower(open_checkpoint(options.model)), ReferenceModel(options.model)
    plain = plain_plan(lowering.model, lowering.spec_16bit, "gptq")
    dense = dense_formats(plain, (4,), 64, lowering.float_type)[0]
    texts = [(splits.task.prompt(item, ()), splits.task.answer(item)) for item in train.train.items]
    moments = calibrate(reference, reference.encode_pairs(texts)).second_moments
    store = UnitStore(lowering, moments, "gptq")
    data = (TaskData(splits.task, splits.validation, 1, ()),)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "work", "bench", Disk())
        trials = Trials(reference, store, data, KL_ITEMS, silent, journal)
        gains = measure_gains(trials, plain, (spec, probe_spec), silent)
        whole = SensitivityTable(
            gains, {}, np.ones((lowering.model.num_layers, lowering.model.layers[0].experts.count))
        )
        asked = [reference.encode_pairs(texts[:TEXTS])]
        fisher = predict_units(reference, store, (spec,), asked, 0, journal, silent)
        shots = {splits.task.name: ()}
        inputs = sweep_inputs(lowering, (train,), shots, (spec, probe_spec), dense, "gptq", 0, KL_ITEMS)
        swept = Sweep(lowering, inputs, Journal(Path(folder) / "sweep", "bench", Disk()), torch.get_num_threads())
        found = swept.run(silent)
        units = list(plain.units)
        exact = [trials.kl(replace(plain, units={**plain.units, unit: spec}), str(unit)).mean for unit in units]
        predicted = {
            "Fisher": [fisher[(unit, spec)] for unit in units],
            "gain per layer and projection, whole model": [whole.unit_loss(store, unit, spec) for unit in units],
            "gain per layer, layer by layer": [found.sensitivity.unit_loss(found.store, unit, spec) for unit in units],
            "output error alone": [store.error(unit, spec) for unit in units],
        }
    measured, layers = np.array(exact), np.array([unit.layer for unit in units])
    told = {}
    for name, values in predicted.items():
        guess = np.array(values)
        inside = [spearman(guess[layers == layer], measured[layers == layer]) for layer in np.unique(layers)]
        told[name] = {"all units": spearman(guess, measured), "within layers": [round(value, 3) for value in inside]}
    print(json.dumps({"format": str(spec), "units": len(units), "spearman": told}, indent=1))


if __name__ == "__main__":
    main()
