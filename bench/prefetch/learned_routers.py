"""Ways to foresee later routers, counted on a checkpoint.

    python -m bench.prefetch.learned_routers examples/model examples/data/gsm8k --train 20000 --test 8000

Needs `pip install ".[compile]"`. Takes a minute for the shipped example, and 15 minutes for the example of natural
weights. Reads `train.jsonl` and `test.jsonl` of the folder, and joins the texts into passes of 256 tokens. Prints, for
one to three layers ahead, the share of a token's chosen experts that are among the top-k foreseen, the mean over tokens
and layers. It knows the models of transformers that have one linear gate per layer.

`own router`: the later router on this layer's stream. `after shared expert`: the same, its shared expert added before.
`from logits`, `from inputs`, `from both`: ridge regression on the logits of all these routers, on what this layer's
router reads, or on both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PASS_TOKENS = 256
MOST_AHEAD = 3
RIDGE = 1e-3
"""Penalty of a weight, as a share of the sum of squares of its input."""


class Routing:
    """A model of transformers, and the stream before each router of its last pass."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        layers = self._model.model.layers
        self._norms = [layer.post_attention_layernorm for layer in layers]
        self._blocks = [layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe for layer in layers]
        self._gates = [block.gate.weight.float() for block in self._blocks]
        self.count, self.experts = len(layers), len(self._gates[0])
        self.top_k = self._model.config.num_experts_per_tok
        self.has_shared = hasattr(self._blocks[0], "shared_expert")
        self._streams: dict[int, Tensor] = {}
        self._is_recording = False
        for at, norm in enumerate(self._norms):
            norm.register_forward_pre_hook(self._record(at))

    def _record(self, at: int) -> Callable[[Any, tuple[Tensor, ...]], None]:
        def hook(norm: Any, given: tuple[Tensor, ...]) -> None:
            if self._is_recording:
                self._streams[at] = given[0].detach().reshape(-1, given[0].shape[-1])

        return hook

    def passes(self, file: Path, tokens: int) -> Iterator[int]:
        """Run the texts of a file, up to so many tokens. Yield the tokens of each pass."""
        waiting, done = list[int](), 0
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            waiting += self._tokenizer(row["text"] if "text" in row else next(iter(row.values()))).input_ids
            if len(waiting) >= PASS_TOKENS and done < tokens:
                self._is_recording = True
                self._model(torch.tensor([waiting[:PASS_TOKENS]]))
                self._is_recording = False
                waiting, done = [], done + PASS_TOKENS
                yield PASS_TOKENS

    def inputs(self, layer: int) -> Tensor:
        """Return what the router of a layer reads, [T, D]."""
        normed: Tensor = self._norms[layer](self._streams[layer])
        return normed

    def chosen(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the experts that a layer chooses, best first, and their weights, which sum to 1: [T, K] each."""
        best = torch.softmax(self.logits(layer), 1).topk(self.top_k, 1)
        return best.indices, best.values / best.values.sum(1, keepdim=True)

    def activations(self, layer: int) -> Tensor:
        """Return SiLU of the gate of the chosen experts, [T, K, F]. Knows the experts of Mixtral."""
        gates = self._blocks[layer].experts.gate_up_proj.chunk(2, 1)[0]
        activations = torch.nn.functional.silu(torch.einsum("td,efd->tef", self.inputs(layer), gates))
        chosen = self.chosen(layer)[0][:, :, None].expand(-1, -1, activations.shape[2])
        return activations.gather(1, chosen)

    def expert_outputs(self, layer: int) -> Tensor:
        """Return the output of every expert of a layer for what its router reads, [T, E, D].

        Knows the experts of Mixtral: gate and up in one matrix, SiLU.
        """
        experts, inputs = self._blocks[layer].experts, self.inputs(layer)
        gate, up = torch.einsum("td,efd->tef", inputs, experts.gate_up_proj).chunk(2, 2)
        output: Tensor = torch.einsum("tef,edf->ted", torch.nn.functional.silu(gate) * up, experts.down_proj)
        return output

    def logits(self, layer: int, ahead: int = 0, after_shared: bool = False) -> Tensor:
        """Return the logits of the router `ahead` layers later for the stream of a layer, [T, E].

        after_shared: add the layer's shared expert to the stream first.
        """
        stream = self._streams[layer]
        if after_shared:
            block, inputs = self._blocks[layer], self.inputs(layer)
            stream = stream + torch.sigmoid(block.shared_expert_gate(inputs)) * block.shared_expert(inputs)
        logits: Tensor = self._norms[layer + ahead](stream) @ self._gates[layer + ahead].T
        return logits

    def features(self, layer: int) -> dict[str, Tensor]:
        """Return the inputs of a regression: what the router reads, logits of all routers, and ones."""
        logits = [self.logits(layer, ahead) for ahead in range(MOST_AHEAD + 1) if layer + ahead < self.count]
        inputs = self.inputs(layer)
        return {"inputs": inputs, "logits": torch.cat(logits, 1), "one": torch.ones(len(inputs), 1)}


REGRESSIONS = {
    "from logits": ("logits", "one"),
    "from inputs": ("inputs", "one"),
    "from both": ("inputs", "logits", "one"),
}
Maps = dict[tuple[str, int, int], Tensor]
"""Weights [features, E] by regression, layer and distance."""


def pairs(routing: Routing) -> list[tuple[int, int]]:
    """Return the layers and distances that have a later router."""
    every = ((layer, ahead) for layer in range(routing.count) for ahead in range(1, MOST_AHEAD + 1))
    return [(layer, ahead) for layer, ahead in every if layer + ahead < routing.count]


def fit(routing: Routing, file: Path, tokens: int) -> tuple[Maps, int]:
    """Return the regressions on the tokens of a file, and the number of tokens."""
    moments: dict[tuple[str, int], Tensor] = {}
    products: dict[tuple[str, int, int], Tensor] = {}
    done = 0
    for count in routing.passes(file, tokens):
        done += count
        for layer in range(routing.count):
            parts = routing.features(layer)
            for name, chosen in REGRESSIONS.items():
                x = torch.cat([parts[part] for part in chosen], 1).double()
                moments[name, layer] = moments.get((name, layer), torch.zeros(())) + x.T @ x
                for ahead in (ahead for at, ahead in pairs(routing) if at == layer):
                    y = routing.logits(layer + ahead).double()
                    y -= y.mean(1, keepdim=True)
                    key = (name, layer, ahead)
                    products[key] = products.get(key, torch.zeros(())) + x.T @ y
    maps = {}
    for (name, layer, ahead), product in products.items():
        squares = torch.diagonal(moments[name, layer])
        penalty = torch.diag(RIDGE * squares + 1e-6 * squares.mean())
        maps[name, layer, ahead] = torch.linalg.solve(moments[name, layer] + penalty, product).float()
    return maps, done


def recalls(routing: Routing, maps: Maps, file: Path, tokens: int) -> tuple[dict[str, list[float]], int]:
    """Return the recall of each way, one to MOST_AHEAD layers ahead, and the number of tokens."""
    hits: dict[tuple[str, int], float] = {}
    chosen_in_all: dict[int, int] = {}
    done = 0
    for count in routing.passes(file, tokens):
        done += count
        for layer, ahead in pairs(routing):
            chosen = routing.logits(layer + ahead).topk(routing.top_k, 1).indices
            is_chosen = torch.zeros(count, routing.experts, dtype=torch.bool).scatter_(1, chosen, True)
            chosen_in_all[ahead] = chosen_in_all.get(ahead, 0) + chosen.numel()
            parts = routing.features(layer)
            ways = {"own router": routing.logits(layer, ahead)}
            if routing.has_shared:
                ways["after shared expert"] = routing.logits(layer, ahead, after_shared=True)
            for name, used in REGRESSIONS.items():
                ways[name] = torch.cat([parts[part] for part in used], 1) @ maps[name, layer, ahead]
            for name, logits in ways.items():
                found = is_chosen.gather(1, logits.topk(routing.top_k, 1).indices).sum().item()
                hits[name, ahead] = hits.get((name, ahead), 0) + found
    names = dict.fromkeys(name for name, _ in hits)
    distances = range(1, MOST_AHEAD + 1)
    return {name: [hits[name, ahead] / chosen_in_all[ahead] for ahead in distances] for name in names}, done


def main() -> None:
    """Read the command line, fit, and print a line per way."""
    parser = argparse.ArgumentParser(description="What foresees later routers, on a checkpoint.")
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--train", type=int, default=50_000, help="tokens to fit to")
    parser.add_argument("--test", type=int, default=8_000, help="tokens to count on")
    options = parser.parse_args()
    with torch.no_grad():
        routing = Routing(options.model)
        maps, trained = fit(routing, options.data / "train.jsonl", options.train)
        rows, counted = recalls(routing, maps, options.data / "test.jsonl", options.test)
    print(f"{trained} train tokens, {counted} test tokens")
    for name, row in rows.items():
        print(f"{name:20}", " ".join(f"{recall:.4f}" for recall in row))


if __name__ == "__main__":
    main()
