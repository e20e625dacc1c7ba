"""Scales and minima in bytes: nearest values, equal steps after a second fit, independent rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.quantization.quantized import LARGEST_BYTE, bytes_of, exponents, on_bytes
from moec.compiler.quantization.quantizers.gptq import quantize_gptq
from moec.compiler.quantization.quantizers.rtn import quantize_rtn
from moec.manifests.quant import QuantSpec

pytestmark = pytest.mark.usefixtures("one_thread")


@given(rows=st.integers(1, 6), groups=st.integers(1, 8), power=st.integers(-40, 15), seed=st.integers(0, 999))
def test_values_are_near_and_found_again(rows: int, groups: int, power: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = (torch.rand(rows, groups, generator=generator) * 2.0**power).clamp_max(65280)
    minima = -(torch.rand(rows, groups, generator=generator) * 2.0**power).clamp_max(65280)
    minima[0, 0] = 0
    near, low = on_bytes(scales, minima, 3)
    assert near.dtype == low.dtype == torch.float16 and bool((low <= 0).all())
    for values, found in ((scales, near.float()), (-minima, -low.float())):
        step = torch.ldexp(torch.ones(rows), exponents(values)).unsqueeze(1)
        assert bool(((values - found).abs() <= step / 2).all())
        assert bool((step <= (values.amax(1, keepdim=True) / 127.5).clamp_min(2.0**-24)).all()), "seven bits at least"
        stored, ends = bytes_of(found)
        assert stored.dtype == ends.dtype == torch.uint8 and bool(((ends >= 103) & (ends <= 135)).all())
        assert torch.equal(torch.ldexp(stored.float(), ends.int().unsqueeze(1) - 127), found)
    again = on_bytes(near, low, 3)
    assert torch.equal(again[0], near) and torch.equal(again[1], low)
    for row in range(rows):
        alone = on_bytes(scales[row : row + 1], minima[row : row + 1], 3)
        assert torch.equal(alone[0], near[row : row + 1]) and torch.equal(alone[1], low[row : row + 1])


def test_minima_above_zero_give_way_to_wider_scales() -> None:
    scales, minima = on_bytes(torch.tensor([[1.0]]), torch.tensor([[6.0]]), 3)
    assert float(minima) == 0 and float(scales) == 3.0, "0 to 9 in three steps, where 6 to 9 were asked for"


@pytest.mark.parametrize("values", [[[1.0, 1.0 / 3]], [[-1.0, 0.5]], [[1.0, 2.0**-9]]])
def test_other_values_are_refused(values: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="multiples of one power of two"):
        bytes_of(torch.tensor(values))
    assert LARGEST_BYTE == 255


@pytest.mark.parametrize("text", ["q1g32b", "q2g32b", "q3g64b", "q4g32b", "q5g32b"])
def test_quantizers_lose_little_by_bytes(text: str) -> None:
    """Output errors are within 2 % of those with scales of 16 bits, with less than 95 % of the bytes."""
    spec, plain = QuantSpec.parse(text), QuantSpec.parse(text[:-1])
    generator = torch.Generator().manual_seed(3)
    weight, inputs = torch.randn(64, 512, generator=generator), torch.randn(2048, 512, generator=generator)
    moment = inputs.T @ inputs
    for rounded in (lambda s: quantize_rtn(weight, s, True), lambda s: quantize_gptq(weight, s, moment, 2048)):
        small, large = (((rounded(s).dequantize() - weight) @ inputs.T).norm() for s in (spec, plain))
        assert float(small) < 1.02 * float(large)
    assert spec.row_bytes(512) < 0.95 * plain.row_bytes(512)
