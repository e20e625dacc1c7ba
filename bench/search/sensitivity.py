"""Rank correlation of each proxy with exact sensitivity.

    python -m bench.search.sensitivity

Takes three minutes on two cores.

Exact sensitivity is the measured KL on validation answers with one projection of one expert in a format. It is compared
with the predictions of the proxies:

* Fisher, from gradients.
* A measured gain per layer and projection, on the whole model.
* The gain per layer of a compile layer by layer, on a few texts.
* The output error alone.

Prints Spearman's rank correlations over all units of the shipped example, and within layers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from moec.compiler.sensitivity.sensitivity import SensitivityTable, measure_gains
from moec.compiler.walker.planning import sweep_inputs
from moec.compiler.walker.sweep import Sweep
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.manifests.quant import QuantSpec

from .measured_example import measured_example, silent

KL_ITEMS = 128


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return the correlation of ranks. Measured errors have no ties."""
    ranks = [values.argsort().argsort() for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> None:
    """Read the command line, measure and print one JSON object."""
    parser = argparse.ArgumentParser(description="Rank correlation of the sensitivity proxies with exact measurement.")
    parser.add_argument("--model", default="examples/model")
    parser.add_argument("--data", default="examples/data/gsm8k")
    parser.add_argument("--bits", type=int, default=2)
    options = parser.parse_args()
    spec, probe_spec = QuantSpec(options.bits, 64), QuantSpec(3, 64)
    example = measured_example(options.model, options.data)
    lowering, store, plain = example.lowering, example.store, example.plain
    with tempfile.TemporaryDirectory() as folder:
        trials = example.trials(Path(folder) / "work", KL_ITEMS)
        gains = measure_gains(trials, plain, (spec, probe_spec), silent)
        whole = SensitivityTable(
            gains, {}, np.ones((lowering.model.num_layers, lowering.model.layers[0].experts.count))
        )
        fisher = example.fisher((spec,), trials.journal)
        splits, dense = (example.splits,), example.dense(4)
        inputs = sweep_inputs(
            lowering, splits, {example.splits.task.name: ()}, (spec, probe_spec), dense, "gptq", 0, KL_ITEMS
        )
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
