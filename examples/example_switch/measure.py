"""Measure the checkpoint on a split: ``python -m example_switch.measure [--split test] [--bits 2]``.

With ``--bits`` the routed experts are first rounded, as by ``example_model.measure``.
"""

from functools import partial

import torch
from example_model.measure import measure, parse_options, round_to_nearest
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
    """Read the command line and print one JSON object."""
    options = parse_options("Measure the second example.", MODEL, (TASK,))
    torch.set_num_threads(1)
    model = read_model(options.model)
    if options.bits:
        round_experts(model, options.bits)
    measure(TASK, options, partial(answers, model, Tokenizer.from_file(str(options.model / "tokenizer.json"))))


if __name__ == "__main__":
    main()
