"""Steps of the quantizers in C++, compared with torch: codes and scales agree up to ties, sums up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from moec.compiler.quantization.quantized import RangeExceeded
from moec.compiler.quantization.quantizers import column_steps, gptq
from moec.compiler.quantization.quantizers.refit import FitInputs, refit
from moec.compiler.quantization.quantizers.rtn import CodedColumns, nearest
from moec.manifests.quant import QuantSpec
from moec.runtime import kernels

Result = TypeVar("Result")
FORMATS = (
    "q1", "q1g64b", "q1.6s", "q1.6g64s", "q1.6g128s", "q2g32b", "q2g64", "q2s", "q3g128b", "q4", "q4g32s", "q5g32b",
    "q6g64", "q8g128", "q8s",
)  # fmt: skip

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif("scalar" not in kernels.available(), reason="the kernel extension is not built"),
]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    kernels.select(kernels.available()[0])


def both(compute: Callable[[], Result]) -> tuple[Result, Result]:
    """Return what the extension computes, and what torch does."""
    found = []
    for name in (kernels.available()[0], kernels.NUMPY):
        kernels.select(name)
        found.append(compute())
    return found[0], found[1]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moment_of(columns: int) -> Tensor:
    inputs = draw(3 * columns, columns, seed=1) @ (draw(columns, columns, seed=2) / columns**0.5 + torch.eye(columns))
    return inputs.T @ inputs


def error_of(matrix: CodedColumns, weights: Tensor, shares: Tensor) -> Tensor:
    """Return the weighted squared errors, [N]."""
    difference, _ = column_steps.differences(
        weights, matrix.codes, matrix.scales, matrix.minima, torch.arange(len(weights))
    )
    return (difference.double().square() * shares.double()[:, None]).sum(0)


@pytest.mark.parametrize("rows", [1, 7, 64, 131])
@pytest.mark.parametrize("text", FORMATS)
def test_rounding_to_nearest(text: str, rows: int) -> None:
    spec, weights = QuantSpec.parse(text), draw(384, rows)
    weights[:128, rows // 2] = 0
    weights[128:256] *= 1e-6
    shares = torch.rand(384, generator=torch.Generator().manual_seed(3))
    shares[::5] = 0
    for clip_search, importance in ((False, None), (True, None), (True, shares)):
        found, expected = both(lambda chosen=(clip_search, importance): nearest(weights, spec, *chosen))
        assert found.codes.dtype == expected.codes.dtype and found.codes.shape == expected.codes.shape
        # A trial whose error is equal up to rounding may be taken instead.
        same = (found.scales == expected.scales) & (found.minima == expected.minima)
        assert same.float().mean() > 0.97 and (clip_search or same.all())
        alike = same.repeat_interleave(len(weights) // len(same), 0)
        assert (found.codes == expected.codes)[alike].float().mean() > 0.999
        given = torch.ones(384) if importance is None else importance
        torch.testing.assert_close(
            error_of(found, weights, given), error_of(expected, weights, given), rtol=1e-4, atol=1e-12
        )


@pytest.mark.parametrize("text", ["q4", "q2s", "q1.6s", "q3g32b", "q1"])
@pytest.mark.parametrize("value", [-1e5, 1e5, 1e8, -3e38])
def test_what_exceeds_float16_is_refused_alike(text: str, value: float) -> None:
    weights = draw(64, 3)
    weights[40, 1] = value

    def outcome() -> str:
        try:
            return str(nearest(weights, QuantSpec.parse(text), True).scales.isfinite().all())
        except RangeExceeded as error:
            return str(error)

    found, expected = both(outcome)
    assert found == expected


def test_float16_values_around_every_binade_are_rounded_alike() -> None:
    halves = torch.arange(0, 0x7C00, 7, dtype=torch.int16).view(torch.float16).float()
    values = torch.cat([halves, halves * (1 + 2**-12), halves * (1 - 2**-12), -halves * (1 + 2**-13)])
    weights = torch.stack([values, values / 3]).repeat(16, 1)
    for text in ("q4", "q8s", "q1"):
        found, expected = both(lambda text=text: nearest(weights, QuantSpec.parse(text), False))
        assert torch.equal(found.scales, expected.scales) and torch.equal(found.minima, expected.minima)


@pytest.mark.parametrize(("columns", "rows"), [(192, 5), (320, 64), (96, 133)])
def test_columns_of_gptq(columns: int, rows: int) -> None:
    """Formats are stacked: groups and numbers of codes differ. A weight between two codes may become either."""
    weights, prepared = draw(columns, rows), gptq.prepare_inputs(moment_of(columns), 3 * columns)
    specs = [QuantSpec.parse(text) for text in ("q1", "q2g32b", "q8g32", "q4s")]
    matrices = [nearest(weights, spec, True) for spec in specs]
    found, expected = both(lambda: gptq.compensate(weights[prepared.order], prepared, matrices))
    for (codes, errors), (other_codes, other_errors), spec in zip(found, expected, specs, strict=True):
        assert int(codes.max()) <= spec.largest_code and (codes != other_codes).float().mean() < 0.01
        same = (codes == other_codes).all(0)
        assert same.float().mean() > 0.5
        torch.testing.assert_close(errors[same], other_errors[same], rtol=1e-4, atol=0)


@pytest.mark.parametrize("text", ["q1g64b", "q1.6g64s", "q2g32", "q3", "q4g32s"])
def test_fitted_scales(text: str) -> None:
    spec, weights, moment = QuantSpec.parse(text), draw(192, 70), moment_of(192) / 600
    before = nearest(weights, spec, True)
    errors = ((before.matrix().dequantize().T - weights) * (moment @ (before.matrix().dequantize().T - weights))).sum(0)
    (found, after), (expected, other) = both(
        lambda: refit(before, FitInputs(moment, moment @ weights), errors.double())
    )
    torch.testing.assert_close(found.scales, expected.scales, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(found.minima, expected.minima, rtol=4e-3, atol=2e-2)
    torch.testing.assert_close(after, other, rtol=1e-3, atol=1e-4 * float(errors.max()))


@pytest.mark.parametrize("rows", [1, 8, 65, 200])
def test_sums_and_systems(rows: int) -> None:
    products, codes = draw(96, rows + 4), torch.randint(0, 16, (96, rows + 4)).to(torch.uint8)
    found, expected = both(lambda: column_steps.code_sums(products, codes, 3.0, 3))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    moment = moment_of(96)
    for sums in (moment[:0], moment.reshape(3, 32, 96).sum(1)):

        def least_squares(sums: Tensor = sums) -> Tensor:
            systems = torch.zeros(3 + len(sums), 3 + len(sums), rows)
            column_steps.code_systems(codes, 2.0, moment, sums, 4, systems)
            return systems.permute(2, 0, 1).triu()

        found, expected = both(least_squares)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    basis = draw(rows, 7, 9)
    systems = (basis @ basis.transpose(1, 2)).permute(1, 2, 0).contiguous()
    given, below = draw(7, rows), torch.ones(7, 7).tril(-1)[..., None] * 1e6
    for found, expected in (
        both(lambda: column_steps.multiplied(systems + below, given)),
        both(lambda: column_steps.solved(systems + below, torch.full((7, rows), 0.5), given)),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_differences_and_their_squares() -> None:
    weights, spec = draw(128, 37), QuantSpec.parse("q3g32")
    matrix = nearest(weights, spec, True)
    given = (weights, matrix.codes, matrix.scales, matrix.minima)
    places = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    (out, squares), (other, expected) = both(lambda: column_steps.differences(*given, places))
    torch.testing.assert_close(out, other, rtol=0, atol=1e-6)
    torch.testing.assert_close(out[places], matrix.matrix().dequantize().T - weights, rtol=0, atol=1e-6)
    torch.testing.assert_close(squares, expected, rtol=1e-5, atol=0)
    assert torch.equal(column_steps.differences(*given)[1], column_steps.differences(*given, places)[1])
