"""Output errors of the quantizers on the example's experts, and how well its routes can be predicted.

    python -m bench.quantization.quantizers [--task gsm8k] [--formats q2g128,q3g128,q4g64]

The example is calibrated on the train split. Errors are measured with the second moments of 1,000 validation items. The
figure is the relative output error sqrt(tr(D H D^T) / tr(W H W^T)), median of all experts. Prints one JSON object per
line.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported

import numpy as np
import torch

from moec.compiler.calibration.collect import ActivationStatistics, calibrate
from moec.compiler.checkpoint.checkpoint import open_checkpoint
from moec.compiler.families import lower
from moec.compiler.quantization.output_error import output_error
from moec.compiler.quantization.quantizers.gptq import quantize_gptq_batch
from moec.compiler.quantization.quantizers.rtn import quantize_rtn
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.reference.model import ReferenceModel
from moec.evaluation.data import load_splits
from moec.manifests.model import PROJECTIONS
from moec.manifests.quant import QuantSpec

EXAMPLES = Path(__file__).parents[2] / "examples"
HELD_OUT_ITEMS = 1_000


def relative_errors(
    store: UnitStore, layer: int, projection: str, spec: QuantSpec, seen: ActivationStatistics, held: torch.Tensor
) -> Iterator[tuple[float, float, float]]:
    """Return the errors of every expert: rounded to nearest, with clip search, and by GPTQ.

    held: second moments to measure with, [E, K, K].
    """
    weights, moments = store.original(layer, projection), seen.second_moments.of(layer, projection)
    tokens = seen.second_moments.tokens(layer)
    for expert, gptq in enumerate(quantize_gptq_batch(weights, spec, moments, tokens)):
        weight = weights[expert]
        whole = float(output_error(weight, torch.zeros_like(weight), held[expert]))
        nearest = quantize_rtn(weight, spec)
        clipped = quantize_rtn(weight, spec, True, moments[expert].diagonal())
        errors = [float(output_error(weight, q.dequantize(), held[expert])) for q in (nearest, clipped, gptq)]
        yield tuple((error / whole) ** 0.5 for error in errors)  # type: ignore[misc]


def main() -> None:
    """Read the command line. Print one line about routes, and one per format and projection."""
    parser = argparse.ArgumentParser(description="Output errors of the quantizers on the example.")
    parser.add_argument("--task", default="gsm8k")
    parser.add_argument("--formats", default="q2g128,q3g128,q4g64")
    options = parser.parse_args()
    reference, splits = ReferenceModel(EXAMPLES / "model"), load_splits(str(EXAMPLES / "data"), options.task)
    found = []
    for items in (splits.train.items, splits.validation.items[:HELD_OUT_ITEMS]):
        pairs = [(splits.task.prompt(item), splits.task.answer(item)) for item in items]
        found.append(calibrate(reference, reference.encode_pairs(pairs)))
    seen, held = found
    shares = seen.popularity / seen.popularity.sum(axis=1, keepdims=True)
    entropy = -(shares * np.log(np.maximum(shares, 1e-30))).sum(axis=1) / np.log(shares.shape[1])
    print(json.dumps({**seen.path_report.to_json(), "popularity_entropy": entropy.round(4).tolist()}))
    store = UnitStore(lower(open_checkpoint(str(EXAMPLES / "model"))), None, "rtn")
    for spec in map(QuantSpec.parse, options.formats.split(",")):
        for projection in PROJECTIONS:
            rows = [
                row
                for layer in range(store.model.num_layers)
                for row in relative_errors(
                    store, layer, projection, spec, seen, held.second_moments.of(layer, projection)
                )
            ]
            nearest, clipped, gptq = np.median(np.array(rows), axis=0).round(4).tolist()
            line = {"format": str(spec), "projection": projection, "nearest": nearest, "clipped": clipped, "gptq": gptq}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
