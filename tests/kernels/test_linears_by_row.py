"""Several products in one go, each matrix on a row of its own."""

from __future__ import annotations

import numpy as np
import pytest

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from tests.kernels.packer import bits, random_matrix
from tests.kernels.products import gate, inputs, linear, matrix_of
from tests.kernels.test_hostile import zeros


@gate
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("formats", [("q4g32s", "bf16", "q2g64", "q8"), ("bf16", "fp16"), ("q3",)], ids=len)
def test_products_of_a_row_each_are_those_products_one_by_one(
    every: str, threads: int, formats: tuple[str, ...]
) -> None:
    kernels.set_threads(threads)
    sizes = (33, 16, 1, 70)
    parts = [random_matrix(rows, 256, QuantSpec.parse(text)) for rows, text in zip(sizes, formats, strict=False)]
    x = inputs(len(parts), 256)
    outs = [np.full((1, len(part.weights)), np.float32(np.nan)) for part in parts]
    kernels.linears_by_row([matrix_of(part) for part in parts], x, outs)
    for at, (part, out) in enumerate(zip(parts, outs, strict=True)):
        assert np.array_equal(bits(out), bits(linear(part, x[at : at + 1])))


def test_each_product_of_a_row_must_have_one(every: str) -> None:
    packed, wide = random_matrix(4, 64, QuantSpec.parse("q4g32")), random_matrix(4, 128, QuantSpec.parse("q4g32"))
    matrix, other = (kernels.PackedMatrix(each.data, *each.weights.shape, each.spec) for each in (packed, wide))
    outs = [zeros(1, 4), zeros(1, 4)]
    for matrices, x, given in (
        ([], zeros(0, 64), []),
        ([matrix] * 9, zeros(9, 64), [zeros(1, 4) for _ in range(9)]),
        ([matrix] * 2, zeros(1, 64), outs),
        ([matrix] * 2, zeros(3, 64), outs),
        ([matrix, other], zeros(2, 64), outs),
        ([matrix] * 2, zeros(2, 64), [zeros(2, 4), zeros(2, 4)]),
        ([matrix] * 2, zeros(2, 64), outs[:1]),
    ):
        with pytest.raises(ValueError):
            kernels.linears_by_row(matrices, x, given)
    if every != "numpy":
        with pytest.raises(ValueError, match="separate"):
            kernels.linears_by_row([matrix, matrix], zeros(2, 64), outs[:1] * 2)
