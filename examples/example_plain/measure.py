"""Measure the plain example: ``python -m example_plain.measure [--split test] [--bits 2] [--task gsm8k]``.

Prints one JSON object per task, as ``example_model.measure``, and one about the routing of its items.
Shapes: T tokens, E experts, K chosen experts, L layers.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from example_model.checkpoint import read_model
from example_model.decode import END, answers, identity
from example_model.items import FIELDS, prompt_of
from example_model.make_data import DATA
from example_model.measure import measure, parse_options, round_experts
from example_model.model import ExampleModel, Experts
from example_smollm2.measure import summary_of
from tokenizers import Tokenizer
from torch import Tensor

from example_plain.train import MODEL

ROUTED_ITEMS = 500
BATCH = 50


class RoutingCounts:
    """Weights, uses and entropies of the routers of a model, summed over the tokens that it passes on."""

    def __init__(self, model: ExampleModel) -> None:
        shape = model.shape
        self.tokens = 0
        self.weights = torch.zeros(shape.layers, shape.top_k)
        self.uses = torch.zeros(shape.layers, shape.experts)
        self.entropies = torch.zeros(shape.layers)
        for at, layer in enumerate(model.blocks):
            layer.experts.register_forward_pre_hook(self._count(at))

    def _count(self, at: int) -> Callable[[Experts, tuple[Tensor, ...]], None]:
        def hook(experts: Experts, given: tuple[Tensor, ...]) -> None:
            probabilities, weights, chosen = experts.route(given[0])
            self.tokens += len(chosen) if at == 0 else 0
            self.weights[at] += weights.sum(0)
            self.uses[at] += torch.bincount(chosen.flatten(), minlength=self.uses.shape[1])
            self.entropies[at] += torch.special.entr(probabilities).sum()

        return hook

    def to_json(self) -> dict[str, Any]:
        """Return means over all layers, with the fields of `summary_of`. Entropies are shares of their maximum.

        entropy_of_uses: of how often each expert of a layer is used, per layer.
        entropy_of_routers: mean over tokens of the router's probabilities of all experts, per layer.
        """
        shares = self.uses / self.uses.sum(1, keepdim=True)
        most = torch.tensor(float(self.uses.shape[1])).log()
        return {
            "tokens": self.tokens,
            **summary_of(self.weights.mean(0) / self.tokens, self.uses),
            "entropy_of_uses": rounded(torch.special.entr(shares).sum(1) / most),
            "entropy_of_routers": rounded(self.entropies / self.tokens / most),
        }


def rounded(values: Tensor) -> list[float]:
    """Return values with four digits."""
    return [round(value, 4) for value in values.tolist()]


@torch.no_grad()
def routing(model: ExampleModel, tokenizer: Tokenizer, task: str, items: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Return how the experts are used on prompts with their right answers. Passes have items of one length."""
    end = identity(tokenizer, END)
    first, second = FIELDS[task]
    texts = [prompt_of(task, item[first]) + " " + item[second] for item in items]
    of_length: dict[int, list[list[int]]] = {}
    for encoded in tokenizer.encode_batch(texts):
        of_length.setdefault(len(encoded.ids) + 1, []).append([*encoded.ids, end])
    counts = RoutingCounts(model)
    for rows in of_length.values():
        for start in range(0, len(rows), BATCH):
            tokens = torch.tensor(rows[start : start + BATCH])
            model(tokens, torch.arange(tokens.numel()))
    return counts.to_json()


def main() -> None:
    """Read the command line and print the results."""
    options = parse_options("Measure the plain example.", MODEL, tuple(FIELDS))
    torch.set_num_threads(1)
    model = read_model(options.model)
    if options.bits:
        round_experts(model, options.bits)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    for task in [options.task] if options.task else FIELDS:
        measure(task, options, partial(answers, model, tokenizer, task))
        lines = (DATA / task / f"{options.split}.jsonl").read_text(encoding="utf-8").splitlines()
        items = [json.loads(line) for line in lines[:ROUTED_ITEMS]]
        print(json.dumps({"task": task, **routing(read_model(options.model), tokenizer, task, items)}))


if __name__ == "__main__":
    main()
