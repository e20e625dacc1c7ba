"""Scales fitted to codes: compared with a plain least-squares solution, and cases that codes do not decide."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.quantization.quantized import QuantizedMatrix
from moec.compiler.quantization.quantizers import refit as module
from moec.compiler.quantization.quantizers.refit import FitInputs, refit
from moec.compiler.quantization.quantizers.rtn import CodedColumns, quantize_rtn
from moec.compiler.quantization.unit_store import row_errors
from moec.manifests.quant import QuantSpec

pytestmark = pytest.mark.usefixtures("one_thread")
FORMATS = ["q1g32", "q1.6g64s", "q1.6s", "q2g32", "q2g64s", "q3", "q4g64"]


def draw(seed: int, columns: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [6, K] and the second moments of correlated inputs, [K, K]."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    inputs = torch.randn(4 * columns, columns, generator=generator) @ mix
    return torch.randn(6, columns, generator=generator), inputs.T @ inputs / (4 * columns) + 0.05 * torch.eye(columns)


def fitted(weight: torch.Tensor, matrix: QuantizedMatrix, moment: torch.Tensor) -> QuantizedMatrix:
    """Return a matrix with fitted scales. The errors that the fit reports are those of the result."""
    scales = matrix.scales.float()
    minima = -scales * float(matrix.spec.centre) if matrix.minima is None else matrix.minima.float()
    columns = CodedColumns(matrix.spec, *(values.T.contiguous() for values in (matrix.codes, scales, minima)))
    before = row_errors(weight, matrix.dequantize(), moment).double()
    found, errors = refit(columns, FitInputs(moment, moment @ weight.T), before)
    after = found.matrix()
    wanted = row_errors(weight, after.dequantize(), moment)
    torch.testing.assert_close(
        errors.float(), wanted, rtol=1e-3, atol=1e-4 * float(row_errors(weight, 0 * weight, moment).max())
    )
    return after


def least_squares(weight: np.ndarray, matrix: QuantizedMatrix, factor: np.ndarray) -> np.ndarray:
    """Return scales, then minima, of one row in float64.

    factor: H = factor^T factor.
    matrix: basis of one row.
    """
    groups, columns = matrix.scales.shape[1], len(weight)
    codes = matrix.codes[0].numpy().astype(float).reshape(groups, -1)
    symmetric = matrix.minima is None
    basis = np.zeros((columns, groups * (1 if symmetric else 2)))
    for group in range(groups):
        rows = slice(group * columns // groups, (group + 1) * columns // groups)
        basis[rows, group] = codes[group] - (matrix.spec.centre if symmetric else 0)
        if not symmetric:
            basis[rows, groups + group] = 1
    return np.linalg.lstsq(factor @ basis, factor @ weight, rcond=None)[0]


@given(text=st.sampled_from(FORMATS), seed=st.integers(0, 2**32 - 1))
def test_scales_are_those_of_least_squares(text: str, seed: int) -> None:
    weight, moment = draw(seed)
    before = quantize_rtn(weight, QuantSpec.parse(text), clip_search=True)
    after = fitted(weight, before, moment)
    assert (
        after.spec == before.spec
        and torch.equal(after.codes, before.codes)
        and (after.minima is None) == before.spec.symmetric
    )
    factor = np.linalg.cholesky(moment.double().numpy()).T
    for row in range(len(weight)):
        one = QuantizedMatrix(after.spec, after.codes[row : row + 1], after.scales[row : row + 1], after.minima)
        best = least_squares(weight[row].double().numpy(), one, factor)
        found = after.scales[row] if after.minima is None else torch.cat((after.scales[row], after.minima[row]))
        # The ridge of 1e-4, and the rounding to float16.
        np.testing.assert_allclose(found.double().numpy(), best, rtol=5e-3, atol=5e-3 * np.abs(best).max())
    errors = [row_errors(weight, matrix.dequantize(), moment) for matrix in (before, after)]
    assert bool((errors[1] <= errors[0] * (1 + 1e-4)).all())


@pytest.mark.parametrize("text", ["q1.6g64s", "q2g64"])
def test_what_codes_do_not_decide_stays(text: str) -> None:
    """These are groups and rows of zeros, and columns whose inputs are zero."""
    weight, moment = draw(3)
    weight[2, :64] = 0
    weight[4] = 0
    touched = torch.arange(128) % 3 > 0
    moment = moment * touched * touched[:, None] + 0.01 * torch.eye(128)
    matrix = fitted(weight, quantize_rtn(weight, QuantSpec.parse(text), clip_search=True), moment)
    assert bool(torch.isfinite(matrix.scales).all()) and not matrix.dequantize()[4].any()
    if matrix.minima is None:  # a minimum may serve other groups, a scale of zeros cannot
        assert not matrix.dequantize()[2, :64].any()


def test_scales_stay_positive_and_finite() -> None:
    """Codes that contradict the weights would make a scale negative. Weights beyond float16 would make one infinite."""
    weight, moment = draw(5)
    before = quantize_rtn(weight, QuantSpec.parse("q1.6g64s"), clip_search=True)
    turned = QuantizedMatrix(before.spec, 2 - before.codes, before.scales, None)
    assert torch.equal(fitted(weight, turned, moment).scales, before.scales)
    assert torch.equal(fitted(weight * 1e6, before, moment).scales, before.scales)


@pytest.mark.parametrize("text", ["q1.6g64s", "q2g32"])
def test_rows_at_once_change_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, moment = draw(7)
    before = quantize_rtn(weight, QuantSpec.parse(text), clip_search=True)
    whole = fitted(weight, before, moment)
    monkeypatch.setattr(module, "SYSTEM_VALUES", 200)
    parts = fitted(weight, before, moment)
    torch.testing.assert_close(whole.scales.float(), parts.scales.float(), rtol=2e-3, atol=0)
