"""Three ways to store two versions of an expert.

    python -m bench.quantization.nested_planes

Takes three minutes on two cores.

* `apart`: a high and a low version, each quantized by itself.
* `planes`: the low version is the upper bits of the high version's codes. Scales and minima serve both.
* `residual`: a low version, and its residual in half of the high version's bits, with scales and minima of its own.

All experts of the shipped example get the same formats, quantized by GPTQ. Prints one JSON object per line: KL on
validation answers of both versions, and their bits per weight.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported

from torch import Tensor

from moec.compiler.calibration.layer_inputs import LayerInputs
from moec.compiler.quantization.layer_quantizer import ExpertQuantizer, Matrices
from moec.compiler.quantization.quantized import QuantizedMatrix
from moec.compiler.sensitivity.answer_walk import AnswerWalk
from moec.compiler.walker.loaded_layer import WeightName
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec

from ..example import SEED, Example

EXAMPLES = Path(__file__).parents[2] / "examples"
CALIBRATION_ITEMS, KL_ITEMS = 500, 512
LOW_BITS, GROUP = 2, 64
HEADER_BITS = 32 / GROUP  # a scale and a minimum of 16 bits
LOW = QuantSpec(LOW_BITS, GROUP)


def quantized(
    example: Example, inputs: Sequence[LayerInputs], weight_of: Callable[[UnitKey], Tensor], specs: Sequence[QuantSpec]
) -> Matrices:
    """Return all units in some formats, quantized by GPTQ.

    inputs: of each layer.
    weight_of: the weights to quantize, [N, K].
    """
    planes: Matrices = {}
    for key in example.model.expert_keys():
        weights = {unit.projection: weight_of(unit) for unit in example.model.units_of(key)}
        quantizer = ExpertQuantizer(key.layer, "gptq", tuple(specs))
        planes.update(quantizer.run(key.expert, weights, *inputs[key.layer].moments_of(key.expert)))
    return planes


def upper_plane(matrix: QuantizedMatrix) -> Tensor:
    """Return weights [N, K] from the upper LOW_BITS of the high version's codes.

    Codes with the same upper bits get the middle of their values.
    """
    spec = matrix.spec
    step = 1 << (int(spec.bitwidth) - LOW_BITS)
    middles = (matrix.codes.int() // step) * step + (step - 1) / 2
    scales = matrix.scales.float().repeat_interleave(spec.group_size, 1)
    if matrix.minima is None:
        raise ValueError(f"{spec} has no minima")
    return matrix.minima.float().repeat_interleave(spec.group_size, 1) + scales * middles


def mean_kl(walk: AnswerWalk, make: Callable[[UnitKey], Tensor]) -> float:
    """Return the mean KL with these weights in every unit, nats per answer token."""

    def weights(name: WeightName) -> Tensor | None:
        return make(name) if isinstance(name, UnitKey) else None

    return float(walk.measure(weights).kl.mean())


def main() -> None:
    """Measure, and print one line per way to store two versions."""
    example = Example(str(EXAMPLES / "model"), str(EXAMPLES / "data"), "gsm8k")
    inputs, _ = example.calibrated(example.texts(example.splits.train.limit(CALIBRATION_ITEMS, SEED).items))
    walk = example.walk(example.splits.validation.items[:KL_ITEMS])
    halves = {QuantSpec(bits, GROUP): QuantSpec(bits // 2, GROUP) for bits in (4, 8)}

    def original(unit: UnitKey) -> Tensor:
        return example.lowering.unit(unit).float()

    units = quantized(example, inputs, original, [LOW, *halves])

    def low_of(unit: UnitKey) -> Tensor:
        return units[(unit, LOW)].dequantize()

    def high_of(spec: QuantSpec, unit: UnitKey) -> Tensor:
        return units[(unit, spec)].dequantize()

    def plane_of(spec: QuantSpec, unit: UnitKey) -> Tensor:
        return upper_plane(units[(unit, spec)])

    rests = quantized(example, inputs, lambda unit: original(unit) - low_of(unit), list(halves.values()))

    def sum_of(spec: QuantSpec, unit: UnitKey) -> Tensor:
        return low_of(unit) + rests[(unit, spec)].dequantize()

    low_kl = mean_kl(walk, low_of)
    for high, half in halves.items():
        bits = int(high.bitwidth)
        high_kl = mean_kl(walk, partial(high_of, high))
        plane_kl = mean_kl(walk, partial(plane_of, high))
        both_kl = mean_kl(walk, partial(sum_of, half))
        low_bits, high_bits, rest_bits = LOW_BITS + HEADER_BITS, bits + HEADER_BITS, bits // 2 + HEADER_BITS
        for way, stored, upgrade, low, top in (
            ("apart", low_bits + high_bits, high_bits, low_kl, high_kl),
            ("planes", high_bits, bits - LOW_BITS, plane_kl, high_kl),
            ("residual", low_bits + rest_bits, rest_bits, low_kl, both_kl),
        ):
            cost = {"bits_stored": stored, "bits_to_upgrade": upgrade, "kl_low": low, "kl_high": top}
            print(json.dumps({"high": str(high), "low": str(LOW), "way": way, **cost}), flush=True)


if __name__ == "__main__":
    main()
