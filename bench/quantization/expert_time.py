"""Time to quantize one expert in each format, next to GPTQModel in its nearest format.

    python -m bench.quantization.expert_time --results FOLDER [--formats q4g64b,...] [--repeats 5]

The expert has the shape of the yardstick: hidden 2,048, width 1,024. Weights and inputs are random, one thread. The
time of moec has everything that a compile does with an expert: factors of the second moments, rounding to nearest
with clip search, GPTQ, and the fit of scales. The time of GPTQModel is that of its `quantize`, from second moments on.
Both run in turn. The error is the squared error of the outputs over the squared outputs. GPTQModel packs 16 bits of
scale and one code of a zero point with each group. FOLDER keeps its environment.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from moec.compiler.quantization.layer_quantizer import ExpertQuantizer
from moec.manifests.model import PROJECTIONS, UnitKey
from moec.manifests.quant import QuantSpec

from ..equal_bytes.peer_environment import peer_seconds, rounded_by

HIDDEN, WIDTH, TOKENS = 2048, 1024, 2500
DEFAULT = "q1g64b,q1g128b,q1.6g64s,q1.6g128s,q2g128b,q2g64b,q2g32b,q3g128b,q3g64b,q3g32b,q4g128b,q4g64b,q4g32s,q8g128"


class Expert:
    """A random expert and the second moments of its inputs."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
        self.weights = {name: torch.randn(shapes[name], generator=generator) * 0.02 for name in PROJECTIONS}
        self.moments = (_moment(HIDDEN, generator), _moment(WIDTH, generator))

    def moment(self, projection: str) -> Tensor:
        """Return the second moment of a projection's inputs."""
        return self.moments[projection == "down"]

    def error(self, projection: str, rounded: Tensor) -> float:
        """Return the squared error of the outputs over the squared outputs."""
        weight, moment = self.weights[projection], self.moment(projection)
        difference = rounded.float() - weight
        return float(((difference @ moment) * difference).sum() / ((weight @ moment) * weight).sum())


def _moment(columns: int, generator: torch.Generator) -> Tensor:
    mixing = torch.randn(columns, columns, generator=generator) / float(columns**0.5) + torch.eye(columns)
    inputs = torch.randn(TOKENS, columns, generator=generator) @ mixing
    return inputs.T @ inputs


def ours(expert: Expert, specs: tuple[QuantSpec, ...]) -> tuple[float, list[float]]:
    """Return the seconds of processor time of all formats, and the errors of the last one."""
    begun = time.process_time()
    with torch.inference_mode():
        result = ExpertQuantizer(0, "gptq", specs).run(0, expert.weights, expert.moments, TOKENS)
    seconds = time.process_time() - begun
    last = {unit.projection: matrix for (unit, spec), matrix in result.items() if spec == specs[-1]}
    return seconds, [expert.error(name, last[name].dequantize()) for name in PROJECTIONS]


def theirs(expert: Expert, folder: Path, spec: QuantSpec) -> tuple[float, list[float]]:
    """Return the seconds of processor time of GPTQModel, and its errors."""
    units = {UnitKey(0, 0, name): weight for name, weight in expert.weights.items()}
    moments = {(0, name): expert.moment(name)[None] for name in PROJECTIONS}
    rounded = rounded_by("gptqmodel", folder, units, int(spec.bitwidth), spec.group_size, moments)
    return peer_seconds(folder), [expert.error(unit.projection, matrix) for unit, matrix in rounded.items()]


def main() -> None:
    """Read the command line, measure and print a table."""
    parser = argparse.ArgumentParser(description="Time to quantize one expert.")
    parser.add_argument("--formats", default=DEFAULT)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    expert, specs = Expert(), tuple(map(QuantSpec.parse, options.formats.split(",")))
    seconds = [ours(expert, specs)[0] for _ in range(options.repeats)]
    print(f"all {len(specs)} formats: {_spread(seconds)} s\n")
    print("| format | moec, s | output error of gate, up, down | GPTQModel, s | output error | times |")
    print("|---|---|---|---|---|---|", flush=True)
    for spec in specs:
        has_peer = spec.bitwidth in (2, 3, 4, 8) and spec.group_size
        pairs = [
            (ours(expert, (spec,)), theirs(expert, options.results, spec) if has_peer else None)
            for _ in range(options.repeats)
        ]
        own = [pair[0][0] for pair in pairs]
        peer = [pair[1][0] for pair in pairs if pair[1] is not None]
        cells = [str(spec), _spread(own), _errors(pairs[0][0][1])]
        if pairs[0][1] is not None:
            ratio = statistics.median(b / a for a, b in zip(own, peer, strict=True))
            cells += [_spread(peer), _errors(pairs[0][1][1]), f"{ratio:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
        line = {"format": str(spec), "moec_s": own, "gptqmodel_s": peer}
        with (options.results / "times.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def _errors(values: list[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


if __name__ == "__main__":
    main()
