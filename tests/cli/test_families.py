"""Every command on bundles of other families, and on one with an encoder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.trace.trace import Trace, TracedPass, TraceHeader
from moec.runtime.trace.trace_file import read_trace, write_trace
from tests.oracles.checkpoints import OWN_FAMILIES, save_own_family
from tests.tiny_compile import compile_tiny, save_dialogues, save_texts
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.tiny_switch import TINY_SWITCHES, save_tiny_switch

from .conftest import Invoke, InvokeIn


@pytest.fixture(scope="module", params=["deepseek", "deepseek-v3", "qwen2-plain-between", "gpt-oss", "phimoe"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    if request.param in OWN_FAMILIES:
        folder = save_own_family(root / "model", OWN_FAMILIES[request.param])
    else:
        folder = save_tiny_family(root / "model", TINY_FAMILIES[request.param])
    texts = save_texts(root / "texts", test=8)
    compile_tiny(
        folder, root / "bundle", "bits_per_weight", 4.5, data=str(texts), tasks=("perplexity",), bits=(3, 4, 16)
    )
    return root


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--prompt", "a lamp", "--max-new-tokens", 4, "--expert-cache", "50%"),
        ("inspect",), ("inspect", "--json"), ("verify",),
        ("bench", "--expert-cache", "50%", "--tokens", 4), ("bench", "--expert-cache", "50%", "--tokens", 4, "--json"),
        ("eval", "--task", "perplexity", "--data", "texts"),
        ("compile", "--data", "texts", "--bits-per-weight", 4.5, "--bits", "3,4,16", "--group-size", "32",
         "--dense-bits", 8, "--no-comparisons", "--plan-only"),
    ],
    ids=lambda arguments: " ".join(map(str, arguments[:2])),
)  # fmt: skip
def test_commands_of_a_family(invoke_in: InvokeIn, family: Path, arguments: tuple[object, ...]) -> None:
    result = invoke_in(family, arguments)
    is_told = arguments[0] in ("inspect", "compile") and "--json" not in arguments
    if is_told and not family.name.startswith(("gpt-oss", "phimoe")):
        assert "layer 0  no routed experts" in result.stdout.replace("layer   0", "layer 0")


PROMPT = "Dialogue:\na lamp\nSummary:"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("encoder")
    folder = save_tiny_switch(root / "model", TINY_SWITCHES["switch"])
    data = save_dialogues(root / "samsum", train=4, validation=4, test=5)
    for split in ("train", "validation", "test"):
        rows = (data / f"{split}.jsonl").read_text().replace('"dialogue"', '"document"')
        (root / "xsum").mkdir(exist_ok=True)
        (root / "xsum" / f"{split}.jsonl").write_text(rows)
    save_texts(root / "texts")
    compile_tiny(folder, root / "bundle", "bits_per_weight", 4.5, data=str(data), tasks=("samsum",), bits=(3, 4, 16))
    compile_tiny(folder, root / "plain", "uniform", 16, dense_bits=16)
    return root


def test_an_empty_path_table_is_told(invoke: Invoke, encoder: Path) -> None:
    """The tiny model has two routed layers in its decoder and two in its encoder."""
    paths = json.loads((encoder / "bundle" / "quality.json").read_text())["statistics"]["paths"]
    assert sorted(paths) == ["frequent_paths", "observed_paths"]
    told = "no path table: it needs three routed layers in the encoder or in the decoder"
    assert (
        told in invoke("inspect", encoder / "bundle").stdout and told not in invoke("inspect", encoder / "plain").stdout
    )
    assert told.partition(": ")[2] in invoke("report", encoder / "bundle", "-o", "-").stdout
    run = ("run", encoder / "bundle", "--prompt", PROMPT, "--max-new-tokens", 1, "--expert-cache", "50%")
    assert f"`prefetch=path` has nothing to go by: {told}" in invoke(*run, "--set", "prefetch=path").stderr
    assert told not in invoke(*run).stderr


@pytest.mark.parametrize("task", ["samsum", "xsum"])
def test_eval_of_summaries(invoke: Invoke, encoder: Path, task: str) -> None:
    """The bundle at 16 bits and the checkpoint give the same answers."""
    found = {}
    for name in ("plain", "model"):
        lines = encoder / f"{name}-{task}.jsonl"
        result = invoke("eval", encoder / name, "--task", task, "--data", encoder / task, "--json", "--per-item", lines)
        assert result.exit_code == 0, result.stderr
        values = json.loads(result.stdout)
        assert values["metric"] == "rouge2" and values["n"] == 5
        found[name] = [json.loads(line)["prediction"] for line in lines.read_text().splitlines()]
    assert found["plain"] == found["model"] and any(found["plain"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect",), ("inspect", "--json"), ("verify",),
        ("bench", "--expert-cache", "50%", "--tokens", 4), ("bench", "--expert-cache", "50%", "--tokens", 4, "--json"),
        ("bench", "--expert-cache", "50%", "--tokens", 4, "--policies", "all", "--json"),
        ("run", "--prompt", PROMPT, "--max-new-tokens", 4, "--expert-cache", "50%"),
        ("run", "--prompt", PROMPT, "--max-new-tokens", 6, "--beams", 3, "--json"),
        ("tune", "--expert-cache", "50%", "--tokens", 4, "--json"),
        ("eval", "--task", "samsum", "--data", "samsum", "--expert-cache", "50%"),
        ("compile", "--data", "samsum", "--task", "samsum", "--bits-per-weight", 4.5, "--bits", "3,4,16",
         "--group-size", "32", "--dense-bits", 8, "--plan-only"),
    ],
    ids=lambda arguments: " ".join(map(str, arguments[:4])),
)  # fmt: skip
def test_commands_with_an_encoder(
    invoke_in: InvokeIn, encoder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...]
) -> None:
    monkeypatch.setattr("moec.cli.commands.measuring.tune.ROUNDS", 1)
    result = invoke_in(encoder, arguments)
    if arguments[0] in ("inspect", "compile") and "--json" not in arguments:
        assert "layer 0  no routed experts" in result.stdout.replace("layer   0", "layer 0")


def test_text_without_a_prompt_is_refused_in_one_sentence(invoke: Invoke, encoder: Path) -> None:
    for name in ("bundle", "model"):
        result = invoke("eval", encoder / name, "--task", "perplexity", "--data", encoder / "texts")
        assert result.exit_code == 1 and "prompt is empty" in result.stderr and "Traceback" not in result.stderr


def test_traces_are_recorded_simulated_and_fitted_to(invoke: Invoke, encoder: Path, tmp_path: Path) -> None:
    bundle, paths = Path(shutil.copytree(encoder / "bundle", tmp_path / "bundle")), []
    for number, prompt in enumerate((PROMPT, "Dialogue:\ntwo red pens\nSummary:")):
        paths.append(tmp_path / f"{number}.trace")
        arguments = ("--prompt", prompt, "--tokens", 6, "--expert-cache", "50%", "--trace-out", paths[-1])
        result = invoke("bench", bundle, *arguments)
        assert result.exit_code == 0, result.stderr
    first = open_bundle(bundle).manifest.model.first_decoder_layer
    trace = read_trace(paths[0])
    assert trace.header.first_decoder_layer == first > 0
    assert [each.first_layer for each in trace.passes] == [0, *[first] * 6] and trace.prompt_passes == 2
    for prefetch in ("lookahead", "path", "popularity", "off"):
        result = invoke("simulate", bundle, "--trace", paths[0], "--set", f"prefetch={prefetch}", "--json")
        assert result.exit_code == 0, result.stderr
        told = json.loads(result.stdout)
        assert told["recorded"]["tokens"] == 6 and told["rows"] and all(row["ttft_ns"] > 0 for row in told["rows"])
    result = invoke("tune", bundle, "--trace", paths[0], "--held-out", paths[1], "--expert-cache", "50%", "--json")
    assert result.exit_code == 0, result.stderr
    assert {row["policy"] for row in json.loads(result.stdout)["rows"]} >= {"lrfu", "hobbit", "optimum"}


def test_a_trace_of_other_stacks_is_refused(invoke: Invoke, encoder: Path, tmp_path: Path) -> None:
    """The trace has equal numbers of layers and experts, but another first decoder layer."""
    model, path = open_bundle(encoder / "bundle").manifest.model, tmp_path / "a.trace"
    counts = tuple(layer.experts.count for layer in model.layers)
    top_k = tuple(layer.experts.top_k for layer in model.layers)
    first = model.first_decoder_layer - 1

    def one_token(layers: range) -> TracedPass:
        chosen, times = tuple(tuple(range(top_k[layer])) for layer in layers), (0,) * len(layers)
        return TracedPass(1, chosen, ((),) * len(layers), times, times, times, 0, 0, 0, layers.start)

    header = TraceHeader("0" * 64, counts, top_k, 1, "off", 1, 1, 1, 1, first)
    write_trace(path, Trace(header, (one_token(range(first)), one_token(range(first, len(counts))))))
    result = invoke("simulate", encoder / "bundle", "--trace", path)
    assert result.exit_code == 1, result.stdout
    assert f"{len(counts)} layers, {first} of them an encoder's, (" in result.stderr
    assert f"the bundle has {len(counts)} layers, {first + 1} of them an encoder's, (" in result.stderr
