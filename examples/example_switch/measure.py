"""Measure the checkpoint on a split: ``python -m example_switch.measure [--split test] [--bits 2]``.

With ``--bits`` the routed experts are first rounded as ``example_model.measure`` rounds those of the first example.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from example_model.decode import scores
from example_model.make_data import DATA
from example_model.measure import METRICS, round_to_nearest
from tokenizers import Tokenizer

from example_switch.checkpoint import MODEL, read_model
from example_switch.decode import TASK, answers
from example_switch.model import SwitchModel


@torch.no_grad()
def round_experts(model: SwitchModel, bits: int) -> None:
    """Round every routed expert in place."""
    for layer in model.routed_layers():
        for weight in (layer.up, layer.down):
            weight.copy_(round_to_nearest(weight, bits))


def main() -> None:
    """Read the command line, print one JSON object."""
    parser = argparse.ArgumentParser(description="Measure the second example.")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--split", choices=("train", "validation", "test"), default="test")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--bits", type=int, help="round the routed experts to this many bits first")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = read_model(options.model)
    if options.bits:
        round_experts(model, options.bits)
    lines = (DATA / TASK / f"{options.split}.jsonl").read_text(encoding="utf-8").splitlines()
    items = [json.loads(line) for line in lines][: options.limit]
    start = time.monotonic()
    found = scores(TASK, answers(model, Tokenizer.from_file(str(options.model / "tokenizer.json")), items), items)
    figures = {"value": round(sum(found) / len(found), 4), "n": len(found)}
    seconds = round(time.monotonic() - start, 1)
    print(
        json.dumps({"bits": options.bits or 16, "task": TASK, "metric": METRICS[TASK], **figures, "seconds": seconds})
    )


if __name__ == "__main__":
    main()
