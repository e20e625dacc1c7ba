"""`moec run --trace-out` records which experts tokens use; `moec merge-traces` counts them over many runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moec.manifests.errors import InputError, OptionError
from moec.manifests.expert_use import architecture_digest, read_use
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.trace.trace_file import read_trace

from .conftest import Invoke

PROMPT = "Once upon a time"


def traced(invoke: Invoke, bundle: Path, path: Path, prompt: str = PROMPT, *options: object) -> dict[str, object]:
    arguments = ("--prompt", prompt, "--max-new-tokens", 5, "--expert-cache", "50%", "--trace-out", path, "--json")
    result = invoke("run", bundle, *arguments, *options)
    assert result.exit_code == 0, result.stderr
    values: dict[str, object] = json.loads(result.stdout)
    return values


def test_a_trace_has_the_experts_of_every_token_and_no_text(invoke: Invoke, mixed_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    told = traced(invoke, mixed_bundle, path)
    trace, manifest = read_trace(path), open_bundle(mixed_bundle).manifest
    tokens = [each.tokens for each in trace.passes]
    assert isinstance(told["token_ids"], list)
    assert tokens == [len(PROMPT), *[1] * (len(told["token_ids"]) - 1)], "the last token is not computed"
    assert all(each.scores is None and each.prompt_scores is None for each in trace.passes)
    assert trace.header.architecture == architecture_digest(manifest.model) and not trace.header.has_rates
    assert trace.header.left_out == tuple(map(tuple, manifest.pruned_experts))
    recorded = path.read_text()
    assert PROMPT not in recorded and not any(word in recorded for word in PROMPT.split() if len(word) > 1)
    untraced = invoke("run", mixed_bundle, "--prompt", PROMPT, "--max-new-tokens", 5, "--json")
    assert json.loads(untraced.stdout)["token_ids"] == told["token_ids"], "recording changes no token"


def test_the_trace_of_a_run_is_that_of_bench_without_scores(invoke: Invoke, mixed_bundle: Path, tmp_path: Path) -> None:
    traced(invoke, mixed_bundle, tmp_path / "run")
    arguments = ("--tokens", 5, "--prompt", PROMPT, "--expert-cache", "50%", "--trace-out", tmp_path / "bench")
    assert invoke("bench", mixed_bundle, *arguments).exit_code == 0
    found, expected = read_trace(tmp_path / "run"), read_trace(tmp_path / "bench")
    assert [each.chosen for each in found.passes] == [each.chosen for each in expected.passes][: len(found.passes)]
    assert expected.passes[0].prompt_scores is not None and expected.header.has_rates
    assert expected.header.architecture == found.header.architecture


def test_many_traces_become_one_file(invoke: Invoke, mixed_bundle: Path, bundle: Path, tmp_path: Path) -> None:
    """Two bundles of one model: their traces are merged."""
    paths = [tmp_path / f"{n}.trace" for n in range(3)]
    for at, (path, folder) in enumerate(zip(paths, (mixed_bundle, bundle, mixed_bundle), strict=True)):
        traced(invoke, folder, path, PROMPT[: 4 + at])
    result = invoke("merge-traces", *paths, "-o", tmp_path / "a", "--json")
    assert result.exit_code == 0, result.stderr
    told, use = json.loads(result.stdout), read_use(tmp_path / "a")[0]
    tokens = sum(each.tokens for path in paths for each in read_trace(path).passes)
    model = open_bundle(bundle).manifest.model
    assert told == {
        "architecture": architecture_digest(model), "traces": 3, "tokens": tokens, "never_offered": [],
        "has_routes": True,
    }  # fmt: skip
    assert use.experts == tuple(layer.experts.count for layer in model.layers)
    spoken = invoke("merge-traces", *paths, "-o", tmp_path / "b")
    assert f"merged 3 traces of {tokens} tokens" in spoken.stderr and spoken.stdout == ""
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--beams", 2), "is of one text, `--beams` decodes several"),
        (("--lossy", "dynamic-precision 0.2,0.9"), "a routing trace is of an exact run"),
    ],
)
def test_a_run_that_cannot_be_recorded_is_refused(
    invoke: Invoke, two_version_bundle: Path, options: tuple[object, ...], message: str, tmp_path: Path
) -> None:
    result = invoke("run", two_version_bundle, "--prompt", "a", "--trace-out", tmp_path / "t", *options)
    assert result.exit_code == OptionError.exit_code and message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_standard_output_takes_the_text_alone(invoke: Invoke, bundle: Path) -> None:
    result = invoke("run", bundle, "--prompt", "a", "--trace-out", "-")
    assert result.exit_code == OptionError.exit_code and "name a file" in result.stderr and result.stdout == ""


def test_a_trace_without_rates_is_not_simulated(invoke: Invoke, mixed_bundle: Path, tmp_path: Path) -> None:
    traced(invoke, mixed_bundle, tmp_path / "t")
    for command in ("simulate", "report"):
        result = invoke(command, mixed_bundle, "--trace", tmp_path / "t")
        assert result.exit_code == InputError.exit_code and "moec bench" in result.stderr
        assert "has no rates of its machine" in result.stderr
