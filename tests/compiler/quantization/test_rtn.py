"""Round to nearest: the error bound, exact groups, and the clip search."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moec.compiler.quantization.quantizers import quantizer
from moec.compiler.quantization.quantizers.rtn import quantize_rtn
from moec.manifests.errors import OptionError
from moec.manifests.quant import QuantSpec

BITWIDTHS = st.sampled_from([2, 3, 4, 5, 6, 8])
WEIGHTS = hnp.arrays(
    np.float32, (2, 64), elements=st.floats(-60_000, 60_000, width=32, allow_nan=False, allow_subnormal=True)
)


def _scale_of_each_weight(matrix: torch.Tensor, columns: int) -> torch.Tensor:
    return matrix.double().repeat_interleave(columns // matrix.shape[1], dim=1)


@given(weights=WEIGHTS, bitwidth=BITWIDTHS, group=st.sampled_from([0, 32, 64]), symmetric=st.booleans())
def test_each_weight_lies_within_half_a_scale(weights: np.ndarray, bitwidth: int, group: int, symmetric: bool) -> None:
    spec = QuantSpec(bitwidth, group, symmetric)
    matrix = quantize_rtn(torch.from_numpy(weights), spec)
    scale = _scale_of_each_weight(matrix.scales, 64)
    minimum = -scale * 2 ** (bitwidth - 1) if symmetric else _scale_of_each_weight(matrix.minima, 64)
    error = (matrix.dequantize().double() - torch.from_numpy(weights).double()).abs()
    float32_rounding = 2**-22 * (2**bitwidth * scale + minimum.abs())
    smallest_half = 2**-24  # scales and minima below it are none
    assert bool((error <= scale / 2 + float32_rounding + smallest_half).all())
    assert int(matrix.codes.max()) < 2**bitwidth


@given(value=st.floats(-65504, 65504, width=16), bitwidth=BITWIDTHS)
def test_a_group_of_one_float16_value_is_exact(value: float, bitwidth: int) -> None:
    matrix = quantize_rtn(torch.full((1, 32), value), QuantSpec(bitwidth))
    assert bool((matrix.dequantize() == value).all())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bitwidth", [2, 3, 4, 5, 6, 8])
def test_zeros_are_exact(bitwidth: int, symmetric: bool) -> None:
    assert not quantize_rtn(torch.zeros(3, 64), QuantSpec(bitwidth, 32, symmetric)).dequantize().any()


def test_values_on_the_grid_are_exact() -> None:
    weight = torch.arange(16.0).repeat(2, 2) * 0.25 - 1.5
    assert torch.equal(quantize_rtn(weight, QuantSpec(4)).dequantize(), weight)


def test_symmetric_is_max_abs_per_channel() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    matrix = quantize_rtn(weight, QuantSpec(4, symmetric=True))
    exact = weight.abs().amax(1, keepdim=True) / 7
    assert matrix.minima is None
    assert bool((matrix.scales.float() >= exact).all())
    assert torch.allclose(matrix.scales.float(), exact, rtol=2**-10)


@given(bitwidth=BITWIDTHS, symmetric=st.booleans(), weighted=st.booleans(), seed=st.integers(0, 999))
def test_clip_search_never_loses(bitwidth: int, symmetric: bool, weighted: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(8, 128, generator=generator)
    importance = torch.rand(128, generator=generator) if weighted else None
    spec, weights = QuantSpec(bitwidth, 64, symmetric), torch.ones(128) if importance is None else importance

    def error(clip_search: bool) -> torch.Tensor:
        matrix = quantize_rtn(weight, spec, clip_search, importance)
        return ((matrix.dequantize() - weight).double().square() * weights).reshape(8, 2, 64).sum(-1)

    assert bool((error(True) <= error(False) * (1 + 1e-5)).all())


@given(
    group=st.sampled_from([0, 64]),
    weighted=st.booleans(),
    seed=st.integers(0, 999),
    tail=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_three_values_have_the_best_of_all_scales(group: int, weighted: bool, seed: int, tail: float) -> None:
    """Compare with every scale of a fine grid, each with the nearest of -1, 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 128, generator=generator)
    weight = weight.sign() * weight.abs() ** tail
    importance = torch.rand(128, generator=generator) ** 2 if weighted else None
    weights = (torch.ones(128) if importance is None else importance).double()
    matrix = quantize_rtn(weight, QuantSpec(1.6, group, True), True, importance)
    assert matrix.minima is None and int(matrix.codes.max()) <= 2
    width = group or 128

    def error(restored: torch.Tensor) -> torch.Tensor:
        return ((restored - weight).double().square() * weights).reshape(4, -1, width).sum(-1)

    grid = torch.linspace(0, 1, 500)[1:, None, None] * weight.abs().max()
    signs = torch.where(weight.abs() > grid / 2, weight.sign(), 0.0)
    best = torch.stack([error(values) for values in signs * grid]).amin(0)
    assert bool((error(matrix.dequantize()) <= best * (1 + 1e-3)).all())


@given(weights=WEIGHTS, clip_search=st.booleans())
def test_three_values_without_a_search_cover_the_range(weights: np.ndarray, clip_search: bool) -> None:
    matrix = quantize_rtn(torch.from_numpy(weights), QuantSpec(1.6, 64, True), clip_search)
    scale = _scale_of_each_weight(matrix.scales, 64)
    error = (matrix.dequantize().double() - torch.from_numpy(weights).double()).abs()
    assert int(matrix.codes.max()) <= 2 and bool(torch.isfinite(matrix.scales).all())
    if not clip_search:
        assert bool((error <= scale / 2 * (1 + 2**-20) + 2**-24).all())


def test_groups_of_three_values_are_exact() -> None:
    weight = torch.tensor([-0.375, 0.0, 0.375]).repeat(64).reshape(1, 192)
    for clip_search in (False, True):
        assert torch.equal(quantize_rtn(weight, QuantSpec(1.6, 64, True), clip_search).dequantize(), weight)
    assert not quantize_rtn(torch.zeros(3, 64), QuantSpec(1.6, 0, True), True).dequantize().any()


def test_clip_search_gains_at_two_bits() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    plain, searched = (quantize_rtn(weight, QuantSpec(2, 64), clip) for clip in (False, True))
    ratio = (searched.dequantize() - weight).norm() / (plain.dequantize() - weight).norm()
    assert ratio < 0.8  # measured 0.74


def test_rows_do_not_depend_on_each_other() -> None:
    weight = torch.randn(4500, 64, generator=torch.Generator().manual_seed(2))
    whole = quantize_rtn(weight, QuantSpec(3, 32), clip_search=True)
    part = quantize_rtn(weight[4000:4100], QuantSpec(3, 32), clip_search=True)
    assert torch.equal(whole.codes[4000:4100], part.codes)
    assert torch.equal(whole.scales[4000:4100], part.scales)


@pytest.mark.gate("G4")
@pytest.mark.parametrize("spec", ["q1.6g64s", "q2g64", "q4", "q5g64b", "q6s", "q8g32s"])
def test_the_number_of_threads_changes_no_code(spec: str) -> None:
    weight = torch.randn(128, 512, generator=torch.Generator().manual_seed(5))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(quantize_rtn(weight, QuantSpec.parse(spec), clip_search=True))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0].codes, results[1].codes)
    assert torch.equal(results[0].scales, results[1].scales)


def test_integer_results_do_not_depend_on_the_input_type() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    one, other = (quantize_rtn(w, QuantSpec(4, 32)) for w in (weight, weight.float()))
    assert torch.equal(one.codes, other.codes)


@pytest.mark.parametrize(
    ("weight", "spec", "message"),
    [
        (torch.zeros(4, 96), "q1.6s", "cannot hold a matrix of shape"),
        (torch.full((1, 64), 1e8), "q1.6s", "exceed the float16 scales"),
        (torch.zeros(4, 60), "q4", "cannot hold a matrix of shape"),
        (torch.zeros(4, 64), "bf16", "cannot hold"),
        (torch.zeros(64), "q4", "cannot hold"),
        (torch.full((1, 32), -1e5), "q4", "exceed the float16 scales"),
        (torch.full((1, 32), 1e8), "q2s", "exceed the float16 scales"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(weight: torch.Tensor, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_rtn(weight, QuantSpec.parse(spec))


def test_lookup_by_name() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(4))
    spec = QuantSpec(4, 32)
    assert torch.equal(quantizer("rtn")(weight, spec, None, 0).codes, quantize_rtn(weight, spec).codes)
    with pytest.raises(OptionError, match="unknown quantizer `awq`, expected one of gptq, rtn, quanto"):
        quantizer("awq")
