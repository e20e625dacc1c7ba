"""Quantizers of other packages: AutoGPTQ's own class and optimum-quanto, and refusals without them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from moec.compiler.quantization.quantizers import auto_gptq, quantizer
from moec.compiler.quantization.quantizers.quanto import quantize_quanto
from moec.compiler.quantization.quantizers.rtn import quantize_rtn
from moec.manifests.errors import MissingDependency, OptionError
from moec.manifests.quant import QuantSpec
from tests.compiler.conftest import TOOLS

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = 1500


@pytest.fixture
def package(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package importable, as `pip install --no-deps auto-gptq` does."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tools)])
    auto_gptq.import_class.cache_clear()


@pytest.fixture(scope="module")
def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [96, 128], and the second moment of correlated inputs."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(96, 128, generator=generator) * 0.02
    mixing = torch.randn(128, 128, generator=generator) / 128**0.5 + torch.eye(128)
    inputs = torch.randn(TOKENS, 128, generator=generator) @ mixing
    return weight, inputs.T @ inputs


def output_error(weight: torch.Tensor, rounded: torch.Tensor, moment: torch.Tensor) -> float:
    difference = rounded - weight
    return float(((difference @ moment) * difference).sum() / ((weight @ moment) * weight).sum())


@pytest.mark.parametrize("text", ["q2g64", "q3g32", "q4g64", "q4g32s", "q5g64", "q8", "q8g128"])
def test_weights_are_those_of_the_class(text: str, package: None, drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The codes and scales of a bundle stand for the weights that the class itself leaves in the layer."""
    weight, moment = drawn
    spec = QuantSpec.parse(text)
    made = quantizer("auto-gptq")(weight, spec, moment, TOKENS)
    layer = torch.nn.Linear(128, 96, bias=False)
    layer.weight.data = weight.clone()
    solver = auto_gptq.gptq_class()(layer)
    solver.quantizer.configure(int(spec.bitwidth), perchannel=True, sym=spec.symmetric, mse=False)
    solver.H, solver.nsamples = moment * 2 / TOKENS, TOKENS
    solver.fasterquant(percdamp=0.01, group_size=spec.group_size or -1)
    step = made.scales.float().max()
    assert (made.dequantize() - layer.weight.data).abs().max() < 0.1 * step  # float16 scales and minima
    assert made.codes.dtype == torch.uint8 and int(made.codes.max()) <= spec.largest_code
    assert (made.minima is None) == spec.symmetric


@pytest.mark.parametrize(("text", "least"), [("q2g64", 0.3), ("q3g32", 0.6), ("q4g64", 0.75), ("q4g32s", 0.7)])
def test_our_own_has_at_most_its_output_error(
    text: str, least: float, package: None, drawn: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Both use the same second moments. Ours also searches clips and fits scales, which gains most at few bits."""
    weight, moment = drawn
    spec = QuantSpec.parse(text)
    errors = [
        output_error(weight, quantizer(name)(weight, spec, moment, TOKENS).dequantize(), moment)
        for name in ("gptq", "auto-gptq", "rtn")
    ]
    assert least * errors[1] < errors[0] < errors[1] < errors[2]


def test_without_moments_weights_are_rounded(package: None, drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    weight, _ = drawn
    made = quantizer("auto-gptq")(weight, QuantSpec.parse("q4g64"), None, 0)
    assert (made.dequantize() - weight).abs().max() <= 0.6 * made.scales.float().max()


def test_no_hollow_package_stays_behind(package: None, drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    quantizer("auto-gptq")(drawn[0], QuantSpec.parse("q8"), drawn[1], TOKENS)
    assert not [name for name in sys.modules if name.split(".")[0] == "auto_gptq"]


def test_formats_that_it_lacks_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(32, 128)
    with pytest.raises(OptionError, match=r"AutoGPTQ has no weights of 1 bits"):
        quantizer("auto-gptq")(weight, QuantSpec.parse("q1g64b"), None, 0)
    auto_gptq.import_class.cache_clear()
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(TOOLS)])
    with pytest.raises(MissingDependency, match="pip install --no-deps auto-gptq"):
        quantizer("auto-gptq")(weight, QuantSpec.parse("q4g64"), None, 0)


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
