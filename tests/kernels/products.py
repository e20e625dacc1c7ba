"""Matrices, experts and error bounds that the tests of products share."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from tests.kernels.packer import Packed, random_matrix, rounded

gate = pytest.mark.gate("G8")
UNIT = 2.0**-24  # half a unit in the last place of float32, relative
SENTINEL = np.float32(123456.0)


def by_bits(formats: tuple[QuantSpec, ...]) -> pytest.MarkDecorator:
    """Give a test the formats of each bitwidth as `specs`: a test for each format would take longer than its work."""
    groups: dict[float, list[QuantSpec]] = defaultdict(list)
    for spec in formats:
        groups[spec.bitwidth].append(spec)
    return pytest.mark.parametrize("specs", groups.values(), ids=[f"{bits:g} bits" for bits in groups])


def matrix_of(packed: Packed) -> kernels.PackedMatrix:
    return kernels.PackedMatrix(packed.data, *packed.weights.shape, packed.spec)


def inputs(tokens: int, columns: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng([tokens, columns, seed]).standard_normal((tokens, columns)).astype(np.float32)


def linear(packed: Packed, x: np.ndarray) -> np.ndarray:
    """Return the product. Checks that memory around the output does not change."""
    rows, guard = len(packed.weights), 64
    memory = np.full(2 * guard + len(x) * rows, SENTINEL)
    out = memory[guard : guard + len(x) * rows].reshape(len(x), rows)
    kernels.linear(matrix_of(packed), x, out)
    assert (memory[:guard] == SENTINEL).all() and (memory[guard + out.size :] == SENTINEL).all()
    return out


def roundings(columns: int, spec: QuantSpec) -> int:
    """Return how often a product is rounded on its way into the sum: once per column, or once per tile plus four."""
    if spec.bitwidth == 16 or kernels.active() == "numpy":
        return columns + 3
    return columns // 32 + 4


def relative_error(columns: int, spec: QuantSpec) -> float:
    """Return gamma = n u / (1 - n u) for n roundings."""
    n = roundings(columns, spec)
    return n * UNIT / (1 - n * UNIT)


def read_by(spec: QuantSpec, x: np.ndarray) -> np.ndarray:
    """Return the activations as a matrix of this format reads them, float64."""
    return x.astype(np.float64) if spec.bitwidth == 16 else rounded(x)[0]


def check_product(packed: Packed, x: np.ndarray, out: np.ndarray) -> None:
    """Check |error| <= gamma sum (|scale| code + |minimum|) |x|, for the activations that the matrix reads."""
    read = read_by(packed.spec, x)
    exact = read @ packed.weights.astype(np.float64).T
    bound = relative_error(x.shape[1], packed.spec) * (np.abs(read) @ packed.magnitudes.astype(np.float64).T)
    excess = np.abs(out - exact) - bound
    assert excess.max() <= 0, f"worst excess {excess.max()}"


def biases_of(width: int, hidden: int) -> list[np.ndarray]:
    draw = np.random.default_rng(8)
    return [draw.normal(0, 0.7, size).astype(np.float32) for size in (width, width, hidden)]


def expert_of(
    width: int, hidden: int, texts: tuple[str, str, str], **options: Any
) -> tuple[kernels.Expert, list[Packed]]:
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    parts = [
        random_matrix(*shape, QuantSpec.parse(text), seed)
        for seed, (shape, text) in enumerate(zip(shapes, texts, strict=True))
    ]
    gate, up, down = (matrix_of(part) for part in parts)
    has_gate = options.get("activation") != "relu"
    return kernels.Expert(gate if has_gate else None, up, down, **options), parts


EXPERTS = [
    (96, 64, ("q4g32", "q3g32s", "q8")),
    (37, 50, ("bf16", "fp16", "bf16")),
    (160, 96, ("q2s", "q2", "fp16")),
    (192, 128, ("q1.6g64s", "q1.6s", "q1.6g64s")),
    (64, 96, ("fp16", "q4g32", "q2")),
]
