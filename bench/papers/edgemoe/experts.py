"""Memory over the number of experts, and the experts that a budget holds, on models of random weights."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

from ..figure import Figure, Measured, Panel, percent
from ..inputs import Inputs
from ..models import PLANTED, RANDOM
from . import arms

COUNTS = (4, 8, 16, 32, 64)
"""Experts of each layer."""
HELD = 4
"""Experts of each layer that fit into the buffer of the second arm."""
BUDGETS = (96, 112, 128, 144, 160)
"""Memory of the process, MiB, for the largest model."""
MIB = 1 << 20
PROMPT_TOKENS, TOKENS, CONTEXT = 8, 64, 256
SEED = 0


def bundle_of(inputs: Inputs, count: int) -> str:
    """Return the name of a bundle of random weights with `count` experts per layer. Makes it if it is not there."""
    name = f"random-{count}"
    path = inputs.bundle(name)
    if not (path / "moec.json").exists():
        checkpoint = inputs.folder / "models" / name
        write_checkpoint(checkpoint, count)
        inputs.compile(checkpoint, path, "--uniform", 16, "--dense-bits", 16)
        shutil.rmtree(checkpoint)
    return name


def write_checkpoint(folder: Path, count: int) -> None:
    """Write a checkpoint of the planted example's shape with `count` experts per layer and random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    config = AutoConfig.from_pretrained(PLANTED.folder)
    config.num_local_experts = count
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(PLANTED.folder / name, folder / name)


def run(inputs: Inputs, bundle: str, *options: object) -> tuple[int, int]:
    """Return the peak memory of a decoding process and the bytes of its expert cache."""
    lengths = ("--prompt-tokens", PROMPT_TOKENS, "--tokens", TOKENS, "--context", CONTEXT)
    told = inputs.told("bench", bundle, "--text", inputs.text("test", 0), *lengths, *options)
    return int(told["measured"]["peak_memory_bytes"]), int(told["memory"]["cache_bytes"])


def memory(inputs: Inputs) -> Measured:
    """Measure peak memory over the number of experts, and the experts that fit into a budget."""
    points: dict[str, list[tuple[float, float]]] = {"all experts in memory": [], f"a buffer of {HELD} per layer": []}
    for count in COUNTS:
        bundle = bundle_of(inputs, count)
        size = arms.expert_bytes(inputs, bundle) * HELD // count
        for name, cache in zip(points, ("100%", str(size)), strict=True):
            points[name].append((float(count), run(inputs, bundle, "--expert-cache", cache)[0] / 1e6))
    largest = bundle_of(inputs, COUNTS[-1])
    one = arms.expert_bytes(inputs, largest) / inputs.opened(largest).manifest.model.num_layers / COUNTS[-1]
    held, peaks = [], []
    for budget in BUDGETS:
        peak, cache_bytes = run(inputs, largest, "--memory", f"{budget}MiB")
        held.append((float(budget), cache_bytes / one))
        peaks.append(peak / MIB / budget)
    panels = [
        Panel("lines", "Peak memory of the process", "experts per layer", "MB", points=points),
        Panel("lines", "Experts in a budget", "memory of the process, MiB", "experts", points={"experts": held}),
    ]
    whole, part = points.values()
    per_expert = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(whole)]
    told = [
        f"all experts in memory: {whole[0][1]:.0f} MB with {COUNTS[0]} experts per layer, {whole[-1][1]:.0f} MB with "
        f"{COUNTS[-1]}",
        f"each further expert per layer takes {min(per_expert):.2f} to {max(per_expert):.2f} MB",
        f"with a buffer: {part[0][1]:.0f} MB and {part[-1][1]:.0f} MB",
        "experts in a budget: " + ", ".join(f"{count:.0f} in {budget:.0f} MiB" for budget, count in held),
        f"largest peak: {percent(max(peaks))} of its budget",
    ]
    is_linear = max(per_expert) < 1.25 * min(per_expert)
    return Measured(panels, told, "same" if is_linear else "partly")


FIGURES = (
    Figure(
        name="edgemoe-experts",
        paper="edgemoe",
        source="Figure 2 right, table III",
        title="Memory over the number of experts",
        reported="Peak memory grows almost linearly with the experts per layer (Switch Transformers). So do the "
        "experts that a budget holds with the budget.",
        models=(RANDOM,),
        how=f"Largest resident set of a process that decodes {TOKENS} tokens in 16 bits. The models have the shape "
        f"of `examples/model` with {COUNTS[0]} to {COUNTS[-1]} experts per layer. One arm has all experts in "
        f"memory, the other a buffer of {HELD} per layer. Right: the experts that the cache holds under "
        f"`--memory`, with {COUNTS[-1]} per layer and a context of {CONTEXT}.",
        why="An expert takes the same bytes in each model. With a buffer of fixed size the peak hardly grows.",
        measure=memory,
    ),
)
