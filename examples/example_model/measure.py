"""Measure the checkpoint on a split: ``python -m example_model.measure [--split test] [--bits 2]``.

With ``--bits`` the routed experts are first rounded to the nearest of 2**bits even levels. The levels lie between the
smallest and the largest weight of each group of 64.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from example_model.checkpoint import read_model
from example_model.decode import answers, scores
from example_model.items import FIELDS
from example_model.make_data import DATA
from example_model.make_tokenizer import MODEL
from example_model.model import ExampleModel

METRICS = {"gsm8k": "exact match", "samsum": "rouge-2"}


def round_to_nearest(weight: Tensor, bits: int, group_size: int = 64) -> Tensor:
    """Round a matrix between the smallest and largest weight of each group. Groups lie along the inputs."""
    groups: Tensor = weight.reshape(-1, group_size)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-10)
    rounded: Tensor = ((groups - low) / step).round() * step + low
    return rounded.view_as(weight)


@torch.no_grad()
def round_experts(model: ExampleModel, bits: int) -> None:
    """Round every routed expert in place."""
    for name, parameter in model.named_parameters():
        if name.endswith((".gate_up", ".down")):
            parameter.copy_(round_to_nearest(parameter, bits))


def parse_options(description: str, model: Path, tasks: Sequence[str]) -> argparse.Namespace:
    """Return the options of both examples' measurements.

    model: default of ``--model``.
    tasks: choices of ``--task``.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, default=model)
    parser.add_argument("--split", choices=("train", "validation", "test"), default="test")
    parser.add_argument("--task", choices=tuple(tasks))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--bits", type=int, help="round the routed experts to this many bits first")
    return parser.parse_args()


def measure(task: str, options: argparse.Namespace, answer: Callable[[Sequence[dict[str, str]]], list[str]]) -> None:
    """Print the metric of a task on the items that the options name, and its seconds, as one JSON object."""
    lines = (DATA / task / f"{options.split}.jsonl").read_text(encoding="utf-8").splitlines()
    items = [json.loads(line) for line in lines][: options.limit]
    start = time.monotonic()
    found = scores(task, answer(items), items)
    figures = {"value": round(sum(found) / len(found), 4), "n": len(found)}
    seconds = round(time.monotonic() - start, 1)
    print(
        json.dumps({"bits": options.bits or 16, "task": task, "metric": METRICS[task], **figures, "seconds": seconds})
    )


def main() -> None:
    """Read the command line and print one JSON object per task."""
    options = parse_options("Measure the example model.", MODEL, tuple(FIELDS))
    torch.set_num_threads(2)
    model = read_model(options.model)
    if options.bits:
        round_experts(model, options.bits)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    for task in [options.task] if options.task else FIELDS:
        measure(task, options, partial(answers, model, tokenizer, task))


if __name__ == "__main__":
    main()
