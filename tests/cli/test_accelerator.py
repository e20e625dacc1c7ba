"""An accelerator on the command line: messages, equal text, and refusals in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .conftest import Invoke

PROMPT = ("--prompt", "Once upon a time", "--max-new-tokens", 6)
ON_TORCH = (
    "--accelerator", "torch-cpu", "--accelerator-memory", "20MiB", "--set", "cooperation=gpu",
    "--set", "accelerator-dense=host",
)  # fmt: skip
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from moec.cli.main import cli
cli.main(sys.argv[1:], prog_name="moec")
"""


def test_a_run_tells_where_experts_were_computed(invoke: Invoke, bundle: Path) -> None:
    """With 16-bit weights the text is equal to that of the CPU."""
    alone = invoke("run", bundle, *PROMPT)
    told = invoke("run", bundle, *PROMPT, *ON_TORCH)
    assert told.exit_code == 0 and told.stdout == alone.stdout
    mode = told.stderr.splitlines()[0]
    assert "; accelerator torch-cpu for routed experts, cooperation gpu, 24 of 24 experts on it in " in mode
    assert "measured: CPU " in mode and "not the CPU's to the bit" in mode
    assert "experts computed: " in told.stderr.splitlines()[-1] and "accelerator" not in alone.stderr


def test_dense_weights_may_be_computed_there(invoke: Invoke, bundle: Path) -> None:
    alone = invoke("run", bundle, *PROMPT)
    told = invoke(
        "run", bundle, *PROMPT, *ON_TORCH, "--accelerator-memory", "200MiB", "--set", "accelerator-dense=device"
    )
    assert told.exit_code == 0 and told.stdout == alone.stdout
    mode = told.stderr.splitlines()[0]
    assert "; accelerator torch-cpu for dense weights and routed experts, cooperation gpu" in mode
    assert "attention of a layer CPU " in mode
    refused = invoke(
        "run", bundle, *PROMPT, *ON_TORCH, "--accelerator-memory", "1MiB", "--set", "accelerator-dense=device"
    )
    assert refused.exit_code == 1 and "under its floor" in refused.stderr


@pytest.mark.parametrize("cooperation", ["gpu", "cpu", "twiddler"])
def test_json_has_counts_and_measured_constants(invoke: Invoke, bundle: Path, cooperation: str) -> None:
    told = json.loads(invoke("run", bundle, *PROMPT, *ON_TORCH, "--set", f"cooperation={cooperation}", "--json").stdout)
    found = told["accelerator"]
    assert found["device"] == "torch-cpu" and found["cooperation"] == cooperation
    assert found["experts"]["resident"] > 0 and found["placement"]["budget_bytes"] == 20 << 20
    assert set(found["latency"]) == {
        "cpu_fixed_ns", "cpu_token_ns", "device_fixed_ns", "device_token_ns", "staging_ns_per_byte", "link_ns_per_byte",
            "launch_ns", "device_layer_ns",
    }  # fmt: skip
    assert told["memory"]["accelerator_bytes"] == 20 << 20


def test_beams_generate_eval_and_bench_take_it(
    invoke: Invoke, bundle: Path, checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    beams = invoke("run", bundle, *PROMPT, *ON_TORCH, "--beams", 4, "--json")
    assert json.loads(beams.stdout)["accelerator"]["experts"]["resident"] > 0
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once"}\n{"prompt": "Twice upon"}\n')
    made = invoke(
        "generate", bundle, "--prompts", prompts, "-o", tmp_path / "out.jsonl", "--max-new-tokens", 3, *ON_TORCH
    )
    assert made.exit_code == 0 and "accelerator torch-cpu" in made.stderr
    scored = json.loads(invoke("eval", bundle, "--data", texts, *ON_TORCH, "--json").stdout)
    alone = json.loads(invoke("eval", bundle, "--data", texts, "--json").stdout)
    assert scored["accelerator"]["experts"]["resident"] > 0 and "accelerator" not in alone
    assert scored["value"] == pytest.approx(alone["value"], rel=1e-5)
    unquantized = json.loads(invoke("eval", checkpoint, "--data", texts, *ON_TORCH, "--json").stdout)
    assert unquantized["value"] == scored["value"]
    timed = invoke("bench", bundle, "--tokens", 3, *ON_TORCH, "--json")
    assert json.loads(timed.stdout)["accelerator"]["experts"]["resident"] > 0


def test_what_an_accelerator_cannot_do_is_refused(invoke: Invoke, bundle: Path, tmp_path: Path) -> None:
    refused = {
        "a routing trace tells how long the CPU took": (
            "bench", bundle, "--tokens", 3, "--trace-out", tmp_path / "t", *ON_TORCH
        ),
        "shares the host's memory": ("run", bundle, *PROMPT, "--accelerator", "torch-cpu"),
        "under its floor": ("run", bundle, *PROMPT, "--accelerator", "torch-cpu", "--accelerator-memory", "1KiB"),
        "have no effect without one": ("run", bundle, *PROMPT, "--set", "cooperation=gpu"),
    }  # fmt: skip
    for message, arguments in refused.items():
        result = invoke(*arguments)
        assert result.exit_code == 1 and message in result.stderr, message
        assert len(result.stderr.strip().splitlines()) <= 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_cuda_is_one_sentence(invoke: Invoke, bundle: Path) -> None:
    result = invoke("run", bundle, *PROMPT, "--accelerator", "cuda")
    assert result.exit_code == 1 and result.stdout == ""
    assert "sees 0 CUDA devices here" in result.stderr and "leave it out to run on the CPU alone" in result.stderr


def test_without_torch_the_extra_is_named(bundle: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "run", str(bundle), *map(str, (*PROMPT, *ON_TORCH))],
        check=False, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 1
    assert 'pip install "moec[cuda]"' in done.stderr and "needs the package `torch`" in done.stderr
