"""Rank correlation of each proxy with exact sensitivity.

    python -m bench.search.sensitivity

Takes three minutes on two cores.

Exact sensitivity is the measured KL on validation answers with one projection of one expert in a format. It is compared
with the predictions of the proxies:

* Fisher, from gradients.
* The output error times the gain of its layer, which the sweep measures on a few texts.
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

from moec.manifests.quant import QuantSpec

from ..example import Example
from .measured_example import measured_example

KL_ITEMS = 128


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return the correlation of ranks. Measured errors have no ties."""
    return float(np.corrcoef(a.argsort().argsort(), b.argsort().argsort())[0, 1])


def main() -> None:
    """Read the command line, measure and print one JSON object."""
    parser = argparse.ArgumentParser(description="Rank correlation of the sensitivity proxies with exact measurement.")
    parser.add_argument("--model", default="examples/model")
    parser.add_argument("--data", default="examples/data/gsm8k")
    parser.add_argument("--bits", type=int, default=2)
    options = parser.parse_args()
    spec = QuantSpec(options.bits, 64)
    specs = tuple(dict.fromkeys((spec, QuantSpec(3, 64))))  # the sweep measures gains at 3 bits
    example = Example(options.model, options.data)
    plain, units = example.plain, list(example.plain.units)
    with tempfile.TemporaryDirectory() as folder:
        found = measured_example(example, specs, KL_ITEMS, Path(folder) / "work")
        exact = [found.kl(replace(plain, units={**plain.units, unit: spec})) for unit in units]
        predicted = {
            "Fisher": [found.prices.unit_loss(found.store, unit, spec) for unit in units],
            "gain per layer": [found.gains.unit_loss(found.store, unit, spec) for unit in units],
            "output error alone": [found.store.error(unit, spec) for unit in units],
        }
    measured, layers = np.array(exact), np.array([unit.layer for unit in units])
    rows = {}
    for name, values in predicted.items():
        guess = np.array(values)
        inside = [spearman(guess[layers == layer], measured[layers == layer]) for layer in np.unique(layers)]
        rows[name] = {"all units": spearman(guess, measured), "within layers": [round(value, 3) for value in inside]}
    print(json.dumps({"format": str(spec), "units": len(units), "spearman": rows}, indent=1))


if __name__ == "__main__":
    main()
