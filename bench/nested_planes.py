"""Two versions of an expert as planes of one: ``python bench/nested_planes.py``, three minutes on two cores.

Of the shipped example, every expert alike: KL on validation answers of the high and of the low version, and what both
take per weight, stored apart; as planes of the high version's codes, whose scales and minima serve both; and as a low
version with what it misses behind it, in half of the high version's bits, with scales and minima of its own. All by
GPTQ. One JSON object a line.
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
from measured_example import MeasuredExample, measured_example, silent
from torch import Tensor

from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.request.uniform import uniform_like
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec

EXAMPLES, KL_ITEMS = Path(__file__).parents[1] / "examples", 512
LOW_BITS, GROUP = 2, 64
HEADER_BITS = 32 / GROUP  # a scale and a minimum of 16 bits
LOW = QuantSpec(LOW_BITS, GROUP)


class _Made(UnitStore):
    """Units whose weights are made of those of another store."""

    def __init__(self, example: MeasuredExample, make: Callable[[UnitKey], Tensor]) -> None:
        super().__init__(example.lowering, None, "gptq")
        self._make = make

    def weight(self, unit: UnitKey, spec: QuantSpec) -> Tensor:
        return self._make(unit)


def upper_plane(store: UnitStore, unit: UnitKey, high: QuantSpec) -> Tensor:
    """What the upper LOW_BITS of the high version's codes say: the middle of the codes that share them. [N, K]."""
    matrix = store.matrix(unit, high)
    step = 1 << (int(high.bitwidth) - LOW_BITS)
    middles = (matrix.codes.int() // step) * step + (step - 1) / 2
    scales = matrix.scales.float().repeat_interleave(high.group_size, 1)
    if matrix.minima is None:
        raise ValueError(f"{high} has no minima")
    return matrix.minima.float().repeat_interleave(high.group_size, 1) + scales * middles


class _Residuals(UnitStore):
    """What the low version of each unit misses, in any format, against the same second moments."""

    def __init__(self, example: MeasuredExample) -> None:
        super().__init__(example.lowering, example.moments, "gptq")
        self._low = example.store

    def original(self, layer: int, projection: str) -> Tensor:
        whole = super().original(layer, projection)
        low = [self._low.weight(UnitKey(layer, expert, projection), LOW) for expert in range(len(whole))]
        return whole - torch.stack(low)

    def with_low(self, unit: UnitKey, spec: QuantSpec) -> Tensor:
        """The low version plus the rest in this format. [N, K]."""
        return self._low.weight(unit, LOW) + self.weight(unit, spec)


def measure(example: MeasuredExample, work: Path, make: Callable[[UnitKey], Tensor]) -> float:
    """Mean KL with these weights in every unit. work: a folder of its own, which remembers by plan alone."""
    plan = uniform_like(example.plain, LOW)  # whatever is below 16 bits is asked of the store
    return example.trials(work, KL_ITEMS).kl(plan, "bench", _Made(example, make)).mean


def main() -> None:
    """Print one line per way to store two versions."""
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
