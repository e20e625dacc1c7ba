"""Measure the checkpoint on a split: ``python -m example_model.measure [--split test] [--bits 2]``.

With ``--bits`` the routed experts are first rounded to the nearest of 2**bits even levels between the smallest and the
largest weight of each group of 64.
"""

import argparse
import json
import time
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
    """Asymmetric rounding between the bounds of each group along the input."""
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


def measure(model: ExampleModel, tokenizer: Tokenizer, task: str, items: list[dict[str, str]]) -> dict[str, object]:
    """The metric of a task on items, and what it took."""
    start = time.monotonic()
    found = scores(task, answers(model, tokenizer, task, items), items)
    return {
        "task": task,
        "metric": METRICS[task],
        "value": round(sum(found) / len(found), 4),
        "n": len(found),
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> None:
    """Read the command line, print one JSON object a task."""
    parser = argparse.ArgumentParser(description="Measure the example model.")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--split", choices=("train", "validation", "test"), default="test")
    parser.add_argument("--task", choices=tuple(FIELDS))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--bits", type=int, help="round the routed experts to this many bits first")
    options = parser.parse_args()
    torch.set_num_threads(2)
    model = read_model(options.model)
    if options.bits:
        round_experts(model, options.bits)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    for task in [options.task] if options.task else FIELDS:
        lines = (DATA / task / f"{options.split}.jsonl").read_text(encoding="utf-8").splitlines()
        items = [json.loads(line) for line in lines][: options.limit]
        print(json.dumps({"bits": options.bits or 16, **measure(model, tokenizer, task, items)}))


if __name__ == "__main__":
    main()
