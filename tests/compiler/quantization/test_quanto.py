"""optimum-quanto: errors of the package, float16 scales, nothing compiled, clear refusals."""

from __future__ import annotations

import sys

import pytest
import torch

from moec.compiler.quantization.quantizers import quantizer
from moec.compiler.quantization.quantizers.quanto import quantize_quanto
from moec.compiler.quantization.quantizers.rtn import quantize_rtn
from moec.manifests.errors import MissingDependency, OptionError
from moec.manifests.quant import QuantSpec

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weight():
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(256, 512, generator=generator) * 2 - 1) * 512**-0.5


def relative(weight, matrix) -> float:
    return float((weight - matrix.dequantize()).norm() / weight.norm())


@pytest.fixture
def no_compiler(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("something was compiled")

    import torch.utils.cpp_extension

    monkeypatch.setattr(torch.utils.cpp_extension, "load", refuse)


# Measured on the same draw, and the limit is 2 % above. The package's weights with float32 scales measure the same.
@pytest.mark.parametrize(
    ("text", "measured"),
    [
        ("q2g128", 0.3169),
        ("q2g64", 0.3060),
        ("q3g128", 0.1399),
        ("q4g128", 0.0633),
        ("q4", 0.0653),
        ("q5g128", 0.0340),
        ("q6g128", 0.0168),
        ("q8", 0.0039),
    ],
)
def test_errors_are_those_of_the_package(text, measured, weight, no_compiler):
    spec = QuantSpec.parse(text)
    matrix = quantize_quanto(weight, spec)
    assert relative(weight, matrix) < 1.02 * measured
    assert relative(weight, matrix) < 1.01 * relative(weight, quantize_rtn(weight, spec))
    assert matrix.codes.dtype == torch.uint8 and int(matrix.codes.max()) < 2**spec.bitwidth
    assert matrix.scales.dtype == matrix.minima.dtype == torch.float16
    assert matrix.scales.shape == matrix.minima.shape == (256, spec.groups(512))
    again = quantizer("quanto")(weight, spec, None, 0)
    assert torch.equal(again.codes, matrix.codes) and torch.equal(again.minima, matrix.minima)


def test_int8_is_symmetric_and_says_so_in_either_form(weight):
    plain, symmetric = (quantize_quanto(weight, QuantSpec.parse(text)) for text in ("q8", "q8s"))
    assert symmetric.minima is None
    torch.testing.assert_close(plain.dequantize(), symmetric.dequantize(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("text", ["q2g32", "q3", "q4g32", "q5", "q6g32", "q8"])
def test_rows_without_range_and_single_rows(text):
    weight = torch.zeros(3, 64)
    weight[1] = 0.5
    weight[2] = torch.linspace(-1, 1, 64)
    spec = QuantSpec.parse(text)
    for part in (weight, weight[2:], weight[:1]):
        dequantized = quantize_quanto(part, spec).dequantize()
        assert torch.isfinite(dequantized).all()
        assert (part - dequantized).abs().max() < 2 / (2**spec.bitwidth - 1)


def test_what_the_package_cannot_express_is_refused(weight):
    for text, match in (("q8g64", "no 8-bit weights in groups"), ("q4g64s", "no symmetric weights of 4 bits")):
        with pytest.raises(OptionError, match=match):
            quantize_quanto(weight, QuantSpec.parse(text))
    for text in ("q4g96", "bf16"):
        with pytest.raises(ValueError, match="cannot hold"):
            quantize_quanto(weight, QuantSpec.parse(text))
    with pytest.raises(ValueError, match="exceed float16"):
        quantize_quanto(torch.full((2, 32), 1e6), QuantSpec.parse("q8"))


def test_a_missing_package_is_named(weight, monkeypatch):
    from moec.compiler.quantization.quantizers import quanto

    quanto.set_up_quanto.cache_clear()
    monkeypatch.setitem(sys.modules, "optimum.quanto", None)
    with pytest.raises(MissingDependency, match="optimum-quanto") as caught:
        quantize_quanto(weight, QuantSpec.parse("q4"))
    assert caught.value.hint == "pip install 'moec[compile]'"
