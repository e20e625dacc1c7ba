"""Options of `moec compile`: early checks, threads, and every quantizer with every bitwidth."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from moec.cli.commands.compiling.compile import compile_command
from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.cli.main import cli
from moec.compiler.quantization.quantizers import QUANTIZERS
from moec.compiler.request.options import DEFAULT_BITS
from moec.compiler.request.request import CompileRequest
from moec.manifests.quant import BITWIDTHS
from moec.runtime import kernels
from tests.tiny_compile import check_bundle, contents, names, save_model, save_texts

from .conftest import Invoke

pytestmark = pytest.mark.usefixtures("one_thread")
LINES = {
    "an ambiguous target": (["--loss", "2"], "`--loss 2` is ambiguous"),
    "no target": ([], "target"),
    "a target without data": (["--loss", "2%"], "is measured on text, and none was given"),
    "data that do not exist": (["--loss", "2%", "--data", "none.csv"], "`none.csv` does not exist"),
    "a misspelt task": (["--loss", "2%", "--data", ".", "--task", "gsm9"], "task `gsm9` is not known"),
    "a missing task file": (["--kl", "0.1", "--data", ".", "--task", "none.toml"], "`none.toml` is missing"),
    "a task file with a fault": (["--kl", "0.1", "--data", ".", "--task", "words.toml"], "unknown key `promt`"),
    "an unknown device": (["--uniform", "4", "--device", "laptop,toaster"], "no device profile is called `toaster`"),
    "a sweep of nothing": (["--sweep", "x"], "--sweep"),
}
PROGRAM = """
import contextlib, io, json, sys
from moec.cli.main import cli
ends = []
for line in json.load(sys.stdin):
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        try:
            cli.main(["compile", "model", *line], prog_name="moec")
        except SystemExit as end:
            code = end.code
    heavy = {"torch", "transformers", "datasets", "pyarrow"}
    ends.append([code, error.getvalue(), sorted(heavy & {name.partition(".")[0] for name in sys.modules})])
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, list[str]]]:
    """Exit code and message of each line, and the heavy packages that were loaded so far."""
    folder = tmp_path_factory.mktemp("early")
    (folder / "words.toml").write_text('promt = "{q}"\n')
    lines = json.dumps([words for words, _ in LINES.values()])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=lines, capture_output=True, text=True, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(LINES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", LINES)
def test_a_wrong_option_is_told_before_the_import_of_torch(
    name: str, ends: dict[str, tuple[int, str, list[str]]]
) -> None:
    code, message, loaded = ends[name]
    assert (code, loaded) == (1, []) and LINES[name][1] in message, message


def test_fields_of_no_known_task_show_a_task_file(tmp_path: Path) -> None:
    """The lines that the message shows are a task of these items."""
    from moec.evaluation.data import load_items
    from moec.manifests.errors import DataError

    path = tmp_path / "tickets.csv"
    path.write_text("id,body,label\n1,It is broken.,bug\n2,Thanks!,praise\n")
    with pytest.raises(DataError) as caught:
        load_items(path)
    assert "--task NAME.toml" in str(caught.value.hint)
    lines = [line.removeprefix("- ") for line in caught.value.message.splitlines() if line.startswith("- ")]
    assert lines == ['prompt = "{body}\\nAnswer:"', 'answer = "label"', 'stop = ["\\n"]', "max_new_tokens = 32"]
    (tmp_path / "tickets.toml").write_text("\n".join(lines))
    items, _ = load_items(path, str(tmp_path / "tickets.toml"))
    assert [items.task.reference(item) for item in items.items] == ["bug", "praise"]


@pytest.mark.parametrize("row", [{"a": "x", "b\n- c": "y"}, {"body": "x"}, {"two words": "x", "ä": "y"}])
def test_the_shown_task_file_is_one_for_any_fields(row: dict[str, str], tmp_path: Path) -> None:
    from moec.evaluation.data import load_items
    from moec.manifests.errors import DataError

    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(DataError) as caught:
        load_items(path)
    lines = [line.removeprefix("- ") for line in caught.value.message.splitlines() if line.startswith("- ")]
    (tmp_path / "own.toml").write_text("\n".join(lines))
    assert len(load_items(path, str(tmp_path / "own.toml"))[0]) == 1


def test_torch_and_the_runtime_compute_with_as_many_threads(
    mixed_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()

    def compiled(request: CompileRequest) -> None:
        with request.open_runtime(mixed_bundle, 0) as engine:
            seen.extend([torch.get_num_threads(), engine.engine.options.threads])
        raise RuntimeError("this is all")

    monkeypatch.setattr("moec.compiler.pipeline.compile_checkpoint", compiled)
    arguments = ["compile", str(tmp_path), "--uniform", "4", "--device", "laptop", "-o", str(tmp_path / "out")]
    CliRunner().invoke(cli, [*arguments, "--threads", "3"])
    assert seen == [3, 3] and torch.get_num_threads() == 1, "torch's own number is back, also after an error"
    CliRunner().invoke(cli, arguments)
    assert seen == [3, 3, 1, 0], "without the option both keep their defaults"


def test_a_partial_bundle_opens_with_all_processors(mixed_bundle: Path) -> None:
    with open_partial(mixed_bundle) as engine:
        assert engine.engine.options.threads == 0


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
