"""Measurements of the split: perplexity, use of experts, routing weights, and answers.

Shapes: L layers, E experts, K chosen experts.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from example_smollm2.network import Network, normed, turns_of
from example_smollm2.perplexity import perplexity

_PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three colours.",
    "Explain in one sentence what a database index is for.",
)
_NEW_TOKENS = 48


def compare(dense: Network, student: Network, rows: dict[str, Tensor], count: int) -> dict[str, Any]:
    """Return the perplexity of both networks on `count` rows of each split, and their ratio."""
    found = {}
    for split, tokens in rows.items():
        before, after = perplexity(dense, tokens[:count]), perplexity(student, tokens[:count])
        found[split] = {
            "tokens": tokens[:count].numel(),
            "dense": round(before, 3),
            "experts": round(after, 3),
            "ratio": round(after / before, 4),
        }
    return found


def kept(path: Path, measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a result from its file. If there is none, measure it and write the file."""
    if not path.exists():
        partial = path.with_suffix(".new")
        partial.write_text(json.dumps(measured()), encoding="utf-8")
        partial.rename(path)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@torch.inference_mode()
def routing(network: Network, tokens: Tensor) -> dict[str, Any]:
    """Return how experts are used on rows of tokens [B, T].

    weights: mean routing weight of the first, second, ... chosen expert.
    most_used, least_used: use of an expert as a multiple of its layer's mean, averaged over the layers.
    half_of_uses: share of the experts that have half of the uses, averaged over the layers.
    of_largest: uses of all experts of all layers over the largest of them, as the Twiddler paper (appendix C) reports
        them for Mixtral-8x7B.
    """
    shape = network.shape
    weights, uses = torch.zeros(shape.top_k), torch.zeros(shape.layers, shape.experts)
    states, turns = functional.embedding(tokens, network.embedding), turns_of(tokens.shape[1], shape)
    for at, layer in enumerate(network.layers):
        states = states + layer.attention(normed(states, layer.input_norm, shape.epsilon), turns)
        read = normed(states, layer.norm, shape.epsilon)
        shares, chosen = layer.feed_forward.routing(read)
        weights += shares.flatten(0, 1).mean(0) / shape.layers
        uses[at] = torch.bincount(chosen.flatten(), minlength=shape.experts)
        states = states + layer.feed_forward(read)
    return summary_of(weights, uses)


def summary_of(weights: Tensor, uses: Tensor) -> dict[str, Any]:
    """Return the fields of `routing` from mean weights [K] and uses [L, E]."""
    ranked = (uses / uses.mean(1, keepdim=True)).sort(1, descending=True).values
    halves = (ranked.cumsum(1) < ranked.sum(1, keepdim=True) / 2).sum(1) + 1
    return {
        "weights": [round(value, 4) for value in weights.tolist()],
        "most_used": round(ranked[:, 0].mean().item(), 3),
        "least_used": round(ranked[:, -1].mean().item(), 3),
        "half_of_uses": round(halves.float().mean().item() / uses.shape[1], 3),
        "of_largest": _spread(uses / uses.max()),
        "use_of_each_rank": [round(value, 3) for value in ranked.mean(0).tolist()],
    }


def _spread(values: Tensor) -> dict[str, float]:
    """Return mean, standard deviation, least value and quartiles."""
    flat = values.flatten()
    low, high = flat.quantile(torch.tensor([0.25, 0.75])).tolist()
    found = {
        "mean": flat.mean().item(), "standard_deviation": flat.std().item(), "least": flat.min().item(),
        "quartile_1": low, "quartile_3": high,
    }  # fmt: skip
    return {name: round(value, 3) for name, value in found.items()}


@torch.inference_mode()
def answers(network: Network, tokenizer: Tokenizer, end: int) -> dict[str, str]:
    """Return greedy answers to a few instructions, in the form of SmolLM2's chat."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    found = {}
    for prompt in _PROMPTS:
        turns = [("system", system), ("user", prompt)]
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        tokens = tokenizer.encode(text + "<|im_start|>assistant\n").ids
        start = len(tokens)
        while len(tokens) < start + _NEW_TOKENS:
            best = int(network.logits(network(torch.tensor([tokens]))[0, -1]).argmax())
            if best == end:
                break
            tokens.append(best)
        found[prompt] = tokenizer.decode(tokens[start:])
    return found
