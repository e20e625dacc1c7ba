"""Processor time and output error of GPTQ on one expert, in the tree of this interpreter.

    python pair.py old|new

`old`: a tree before commit 3a00e2d, whose second moments have a leading dimension of 1. Prints one JSON object: by
format the seconds and the mean relative squared output error of the three projections.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from moec.compiler.quantization.layer_quantizer import ExpertQuantizer
from moec.manifests.quant import QuantSpec

HIDDEN, WIDTH, TOKENS = 2048, 1024, 2500
FORMATS = ("q1g64b", "q1.6g128s", "q2g64b", "q2g32b", "q3g64b", "q4g64b", "q8g128")


def main() -> None:
    """Measure all formats."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    weights = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
    moments = [moment(columns, generator) for columns in (HIDDEN, WIDTH)]
    given = tuple(value[None] if sys.argv[1] == "old" else value for value in moments)
    found = {}
    for text in FORMATS:
        with torch.inference_mode():
            begun = time.thread_time()
            made = ExpertQuantizer(0, "gptq", (QuantSpec.parse(text),)).run(0, weights, given, TOKENS)
            seconds = time.thread_time() - begun
        errors = []
        for (unit, _), matrix in made.items():
            wide, weight = moments[unit.projection == "down"].double(), weights[unit.projection].double()
            difference = matrix.dequantize().double() - weight
            errors.append(float(((difference @ wide) * difference).sum() / ((weight @ wide) * weight).sum()))
        found[text] = [seconds, sum(errors) / 3]
    print(json.dumps(found))


def moment(columns: int, generator: torch.Generator) -> torch.Tensor:
    """Return the second moment of random inputs that depend on each other, [K, K]."""
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    inputs = torch.randn(TOKENS, columns, generator=generator) @ mixing
    return inputs.T @ inputs


if __name__ == "__main__":
    main()
