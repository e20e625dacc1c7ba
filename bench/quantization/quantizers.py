"""Output errors of the quantizers on the example's experts, and how well its routes can be predicted.

    python -m bench.quantization.quantizers [--task gsm8k] [--formats q2g128,q3g128,q4g64]

AutoGPTQ comes from `make quantization-tools`. The example is calibrated on the train split. Errors are measured with
the second moments of 1,000 validation items. The figure is the relative output error
sqrt(tr(D H D^T) / tr(W H W^T)), median of all experts. Prints one JSON object per line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported

import numpy as np
import torch
from torch import Tensor

from moec.compiler.calibration.layer_inputs import LayerInputs
from moec.compiler.quantization.quantizers import quantizer
from moec.compiler.quantization.quantizers.rtn import quantize_rtn
from moec.compiler.quantization.unit_store import relative_output_error
from moec.manifests.model import PROJECTIONS, UnitKey
from moec.manifests.quant import QuantSpec

from ..example import Example, moments_of

EXAMPLES = Path(__file__).parents[2] / "examples"
HELD_OUT_ITEMS = 1_000
NAMES = ("rtn", "rtn, clipped", "quanto", "auto-gptq", "gptq")
TOOLS = Path(__file__).parents[2] / "build" / "quantization-tools"
"""Folder of AutoGPTQ: make quantization-tools."""


def relative_errors(
    weights: Tensor, projection: str, spec: QuantSpec, seen: LayerInputs, held: LayerInputs
) -> Iterator[tuple[float, ...]]:
    """Yield the errors of every expert by each of NAMES.

    weights: of one projection of all experts, [E, N, K].
    seen: inputs that the quantizers know.
    held: inputs to measure with.
    """
    moments, held_moments = moments_of(seen, projection), moments_of(held, projection)
    for expert, weight in enumerate(weights):
        given = (moments[expert], int(seen.tokens[expert]))
        versions = [
            quantize_rtn(weight, spec, True, given[0].diagonal())
            if name == "rtn, clipped"
            else quantizer(name)(weight, spec, *given)
            for name in NAMES
        ]
        held_moment = held_moments[expert]
        yield tuple(float(relative_output_error(weight, each.dequantize(), held_moment)) for each in versions)


def main() -> None:
    """Read the command line. Print one line about routes, and one per format and projection."""
    parser = argparse.ArgumentParser(description="Output errors of the quantizers on the example.")
    parser.add_argument("--task", default="gsm8k")
    parser.add_argument("--formats", default="q2g128,q3g128,q4g64")
    options = parser.parse_args()
    sys.path.append(str(TOOLS))
    example = Example(str(EXAMPLES / "model"), str(EXAMPLES / "data"), options.task)
    seen, statistics = example.calibrated(example.texts(example.splits.train.items))
    held_out, _ = example.calibrated(example.texts(example.splits.validation.items[:HELD_OUT_ITEMS]))
    shares = statistics.popularity / statistics.popularity.sum(axis=1, keepdims=True)
    entropy = -(shares * np.log(np.maximum(shares, 1e-30))).sum(axis=1) / np.log(shares.shape[1])
    print(json.dumps({**statistics.path_report.to_json(), "popularity_entropy": entropy.round(4).tolist()}))
    for spec in map(QuantSpec.parse, options.formats.split(",")):
        for projection in PROJECTIONS:
            rows = list[tuple[float, ...]]()
            for layer, inputs in enumerate(held_out):
                experts = range(example.model.layers[layer].experts.count)
                units = [example.lowering.unit(UnitKey(layer, expert, projection)) for expert in experts]
                weights = torch.stack(units).float()
                rows += relative_errors(weights, projection, spec, seen[layer], inputs)
            errors = np.median(np.array(rows), axis=0).round(4).tolist()
            line = {"format": str(spec), "projection": projection, **dict(zip(NAMES, errors, strict=True))}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
