"""Memory and time of compiles layer by layer.

    python -m bench.walker.layerwise [--plot FILE]

Takes five minutes on two cores.

Random Mixtral checkpoints differ in layers or in experts. Each is compiled in a process of its own with
`--bits-per-weight 4`. It gets the least memory that a compile accepts, so no layer stays between passes. Prints one
JSON object per line: peak memory, wall time, that least memory, and the memory with which all layers stay. The plot
shows memory and time against layers times experts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.compiler.pipeline import compile_checkpoint
from moec.compiler.preflight.preparation import prepare
from moec.compiler.preflight.prepared import MemoryNeed
from moec.compiler.request.options import CompileOptions
from moec.compiler.request.request import CompileRequest
from moec.compiler.request.targets import Target
from moec.compiler.walker.memory import LARGE_TEXTS, SMALL_TEXTS, resident_bytes
from moec.profiles.loading import load_profile
from moec.runtime.trace.statistics import peak_memory_bytes

SHAPES = [(layers, 8) for layers in (2, 4, 8, 16)] + [(4, experts) for experts in (4, 16, 32)]
SIZE, HEADS = 512, 8
TOKENIZER = Path(__file__).parents[2] / "examples" / "model"
DATA = Path(__file__).parents[2] / "examples" / "data" / "gsm8k"
ITEMS = 60
CHILD = "import sys; from bench.walker.layerwise import compile_here; compile_here(*sys.argv[1:])"


def save(folder: Path, layers: int, experts: int) -> Path:
    """Write a random checkpoint with the tokenizer of the example."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
    config = MixtralConfig(
        hidden_size=SIZE, intermediate_size=SIZE, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        vocab_size=len(tokenizer), num_hidden_layers=layers, num_local_experts=experts, num_experts_per_tok=2,
        max_position_embeddings=512, eos_token_id=1, pad_token_id=2, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    MixtralForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def request(model: str, quantizer: str, out: str, memory_bytes: int = 0) -> CompileRequest:
    """Return the compile to measure.

    memory_bytes: its memory; 0: that of the machine.
    """
    options = CompileOptions(
        Target("bits_per_weight", 4.0), data=str(DATA), bits=(2, 4, 16), group_sizes=(32,), dense_bits=8, limit=ITEMS,
        quantizer=quantizer, comparisons=False,
    )  # fmt: skip
    profile = load_profile("raspberry-pi-4b-sd")
    return CompileRequest(model, Path(out), options, profile, open_partial, memory_bytes=memory_bytes)


def compile_here(model: str, quantizer: str, out: str, memory_bytes: str) -> None:
    """Compile in this process, and print its peak bytes."""
    compile_checkpoint(request(model, quantizer, out, int(memory_bytes)))
    print(json.dumps(peak_memory_bytes()))


def estimates(model: str, quantizer: str, out: str) -> tuple[int, int]:
    """Return the least memory that a compile accepts, and the memory with which all layers stay, in bytes."""
    prepared = prepare(request(model, quantizer, out))
    spec, threads, tasks = prepared.lowering.model, torch.get_num_threads(), len(prepared.splits)
    need = MemoryNeed(spec, prepared.request.options, prepared.stored_specs, threads, tasks)
    return need.bytes_with(SMALL_TEXTS), need.bytes_with(LARGE_TEXTS) + resident_bytes(spec, spec.num_layers)


def measure(model: str, quantizer: str, out: str, memory_bytes: int) -> tuple[int, float]:
    """Return peak bytes and seconds of one compile."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, model, quantizer, out, str(memory_bytes)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1]), time.monotonic() - started


def plot(rows: list[dict[str, Any]], target: Path) -> None:
    """Plot peak memory and time against layers times experts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for title, marker, chosen in (
        ("8 experts, more layers", "o-", [row for row in rows if row["experts"] == 8]),
        ("4 layers, more experts", "s-", sorted((r for r in rows if r["layers"] == 4), key=lambda r: r["experts"])),
    ):
        work = [row["layers"] * row["experts"] for row in chosen]
        left.plot(work, [row["peak_bytes"] / 2**20 for row in chosen], marker, label=title)
        right.plot(work, [row["seconds"] for row in chosen], marker, label=title)
    whole = sorted((row["layers"] * row["experts"], row["whole_bytes"] / 2**20) for row in rows)
    left.plot(*zip(*whole, strict=True), "k:", label="all layers stay, estimated")
    left.set_ylabel("peak memory, MiB")
    right.set_ylabel("wall time, s")
    for axis in (left, right):
        axis.set_xlabel("layers x experts")
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.savefig(target, dpi=110)


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(description="Memory and time of compiles layer by layer.")
    parser.add_argument("--quantizer", default="gptq")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rows = []
    for layers, experts in SHAPES:
        with tempfile.TemporaryDirectory() as place:
            model, out = str(save(Path(place) / "model", layers, experts)), str(Path(place) / "out")
            least, whole = estimates(model, options.quantizer, out)
            peak, seconds = measure(model, options.quantizer, out, least)
        rows.append({
            "layers": layers, "experts": experts, "seconds": round(seconds, 1), "peak_bytes": peak,
            "announced_bytes": least, "whole_bytes": whole,
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    if options.plot is not None:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
