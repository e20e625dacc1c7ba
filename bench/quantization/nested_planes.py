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
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported

import torch
from torch import Tensor

from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.request.uniform import uniform_like
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec

from ..search.measured_example import MeasuredExample, measured_example, silent

EXAMPLES, KL_ITEMS = Path(__file__).parents[2] / "examples", 512
LOW_BITS, GROUP = 2, 64
HEADER_BITS = 32 / GROUP  # a scale and a minimum of 16 bits
LOW = QuantSpec(LOW_BITS, GROUP)


class _Made(UnitStore):
    """Units whose weights are computed from those of another store."""

    def __init__(self, example: MeasuredExample, make: Callable[[UnitKey], Tensor]) -> None:
        super().__init__(example.lowering, None, "gptq")
        self._make = make

    def weight(self, unit: UnitKey, spec: QuantSpec) -> Tensor:
        return self._make(unit)


def upper_plane(store: UnitStore, unit: UnitKey, high: QuantSpec) -> Tensor:
    """Return weights [N, K] from the upper LOW_BITS of the high version's codes.

    Codes with the same upper bits get the middle of their values.
    """
    matrix = store.matrix(unit, high)
    step = 1 << (int(high.bitwidth) - LOW_BITS)
    middles = (matrix.codes.int() // step) * step + (step - 1) / 2
    scales = matrix.scales.float().repeat_interleave(high.group_size, 1)
    if matrix.minima is None:
        raise ValueError(f"{high} has no minima")
    return matrix.minima.float().repeat_interleave(high.group_size, 1) + scales * middles


class _Residuals(UnitStore):
    """The residual of the low version of each unit, in any format, quantized against the same second moments."""

    def __init__(self, example: MeasuredExample) -> None:
        super().__init__(example.lowering, example.moments, "gptq")
        self._low = example.store

    def original(self, layer: int, projection: str) -> Tensor:
        whole = super().original(layer, projection)
        low = [self._low.weight(UnitKey(layer, expert, projection), LOW) for expert in range(len(whole))]
        return whole - torch.stack(low)

    def with_low(self, unit: UnitKey, spec: QuantSpec) -> Tensor:
        """Return the low version plus the residual in this format. [N, K]."""
        return self._low.weight(unit, LOW) + self.weight(unit, spec)


def measure(example: MeasuredExample, work: Path, make: Callable[[UnitKey], Tensor]) -> float:
    """Return the mean KL with these weights in every unit.

    work: folder for this measurement alone, because the journal in it distinguishes plans only.
    """
    plan = uniform_like(example.plain, LOW)  # formats below 16 bits take their weights from the store
    return example.trials(work, KL_ITEMS).kl(plan, "bench", _Made(example, make)).mean


def main() -> None:
    """Measure, and print one line per way to store two versions."""
    example = measured_example(str(EXAMPLES / "model"), str(EXAMPLES / "data"), "gsm8k")
    store, highs = example.store, [QuantSpec(4, GROUP), QuantSpec(8, GROUP)]
    store.prepare([LOW, *highs], silent)
    with tempfile.TemporaryDirectory() as folder:
        work, rest = Path(folder), _Residuals(example)
        low_kl = measure(example, work / "low", lambda unit: store.weight(unit, LOW))
        for high in highs:
            bits = int(high.bitwidth)
            more = QuantSpec(bits // 2, GROUP)
            high_kl = measure(example, work / f"high-{bits}", partial(store.weight, spec=high))
            plane_kl = measure(example, work / f"plane-{bits}", partial(upper_plane, store, high=high))
            both_kl = measure(example, work / f"both-{bits}", partial(rest.with_low, spec=more))
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
