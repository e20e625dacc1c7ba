"""Every quantizer with every bitwidth: a bundle that runs, or one sentence that names both."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from moec.cli.commands.compiling.compile import compile_command
from moec.compiler.quantization.quantizers import QUANTIZERS
from moec.compiler.request.options import DEFAULT_BITS
from moec.manifests.quant import BITWIDTHS
from moec.runtime import kernels
from tests.tiny_compile import check_bundle, contents, names, save_model, save_texts

from .conftest import Invoke

pytestmark = pytest.mark.usefixtures("one_thread")
PI = ("--device", "raspberry-pi-4b-sd")
LACKS = {"quanto": "optimum-quanto"}
"""Quantizers without formats below 2 bits, and the names of their packages."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("quantizers") / "tiny", layers=1, experts=2)


@pytest.mark.parametrize("bits", BITWIDTHS)
@pytest.mark.parametrize("quantizer", [name for name in QUANTIZERS if name != "auto-gptq"])
def test_every_quantizer_makes_every_bitwidth_or_refuses_it(
    invoke: Invoke, model: Path, tmp_path: Path, quantizer: str, bits: float
) -> None:
    arguments = ("compile", model, "--uniform", f"{bits:g}", "--quantizer", quantizer, *PI, "-o", tmp_path / "out")
    result = invoke(*arguments)
    if quantizer in LACKS and bits < 2:
        assert result.exit_code == 1 and names(tmp_path) == set()
        assert (
            f"error: {LACKS[quantizer]} has no weights of {bits:g} bits" in result.stderr and "hint: " in result.stderr
        )
        assert invoke(*arguments, "--estimate").exit_code == 1
        return
    assert result.exit_code == 0, result.stderr
    (spec,) = check_bundle(tmp_path / "out")["bits"]["formats"]
    assert spec.startswith("bf16" if bits == 16 else f"q{bits:g}")
    assert invoke("run", tmp_path / "out", "--prompt", "a pen", "--max-new-tokens", "2").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "formats", "version"),
    [
        (("--uniform", "5", "--dense-bits", "6"), {"q5g64"}, 2),
        (("--uniform", "6", "--group-size", "32"), {"q6g32s"}, 2),
        (("--uniform", "8", "--dense-bits", "5"), {"q8g64"}, 2),
        (("--uniform", "8", "--fallback-bits", "5"), {"q8g64"}, 2),
        (("--uniform", "8"), {"q8g64"}, 1),
    ],
)
def test_bundles_of_five_and_six_bits_run_and_verify(
    invoke: Invoke, model: Path, tmp_path: Path, arguments: tuple[str, ...], formats: set[str], version: int
) -> None:
    out = tmp_path / "out"
    assert invoke("compile", model, *arguments, *PI, "-o", out).exit_code == 0
    assert set(check_bundle(out)["bits"]["formats"]) == formats
    assert invoke("verify", out).exit_code == 0
    assert json.loads(invoke("inspect", out, "--json").stdout)["format_version"] == version
    said = [
        invoke("run", out, "--prompt", "a pen", "--max-new-tokens", "3", "--set", f"kernels={name}").stdout
        for name in ("scalar", kernels.available()[0])
    ]
    assert said[0] and said[0] == said[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--uniform", "4", "--symmetric"), "no symmetric weights of 4 bits, found format q4g64s"),
        (("--uniform", "8", "--group-size", "32"), "no 8-bit weights in groups, found format q8g32"),
        (("--uniform", "4", "--fallback-bits", "1"), "no weights of 1 bits"),
    ],
)
def test_what_quanto_cannot_express_is_refused_before_work(
    invoke: Invoke, model: Path, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    result = invoke("compile", model, *arguments, "--quantizer", "quanto", *PI, "-o", tmp_path / "out")
    assert result.exit_code == 1 and sentence in result.stderr and names(tmp_path) == set()


def test_low_versions_of_quanto_have_three_bits(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    low = ("--uniform", "8", "--fallback-bits", "3", "--quantizer", "quanto")
    result = invoke("compile", model, *low, *PI, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    check_bundle(tmp_path / "out")
    assert b"q3g64" in contents(tmp_path / "out")["moec.json"]


@pytest.mark.parametrize("target", [("--bits-per-weight", "4"), ("--loss", "50%")])
def test_a_search_with_quanto_on_the_command_line(
    invoke: Invoke, model: Path, tmp_path: Path, target: tuple[str, ...]
) -> None:
    data = save_texts(tmp_path / "texts", train=4, validation=4, test=6)
    small = ("--data", data, "--dense-bits", "8", "--swaps", "1", "--no-comparisons")
    result = invoke("compile", model, *target, "--quantizer", "quanto", *small, *PI, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    formats = check_bundle(tmp_path / "out")["bits"]["formats"]
    assert any(name.startswith(("q2g", "q3g", "q4g")) for name in formats), json.dumps(formats)


def test_the_help_names_the_default_bitwidths() -> None:
    shown = ",".join(f"{bits:g}" for bits in DEFAULT_BITS)
    (bits,) = [option for option in compile_command.params if option.name == "bits"]
    assert isinstance(bits, click.Option) and f"[default: {shown}]" in (bits.help or "")


def test_a_quantizer_of_inputs_needs_data(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    arguments = ("compile", model, "--uniform", "4", *PI, "-o", tmp_path / "out")
    refused = invoke(*arguments, "--quantizer", "auto-gptq")
    assert refused.exit_code == 1 and "`--quantizer auto-gptq` has no effect without `--data`" in refused.stderr
    metric = invoke(*arguments, "--data", tmp_path, "--metric", "rouge1")
    assert metric.exit_code == 1 and "`--metric` has no effect with `--uniform`" in metric.stderr
    template = invoke(*arguments, "--prompt-template", "a.jinja")
    assert template.exit_code == 1 and "`--prompt-template` has no effect without `--data`" in template.stderr
    assert names(tmp_path) == set()
    assert "weights are rounded to nearest" in invoke(*arguments).stderr
