"""Text that the dense network writes: dialogues and pages.

The student has to answer instructions, and prose alone does not show it any. The dense network writes both sides of a
dialogue from an empty user turn. Source: "Magpie: Alignment Data Synthesis from Scratch", section 2, for the turns;
"Data-Free Quantization Aware Training for LLMs" (LLM-QAT), section 3.1, for pages sampled from nothing.
Shapes: B rows, T tokens of a row.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from example_smollm2.network import Layer, Network, normed, rotated, turns_of

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system prompt of SmolLM2's chat template."""
BATCH, LIKELIEST = 96, 40


class Dialogues:
    """Rows of text by the dense network, on disk.

    Of each four rows two are dialogues with the system prompt, one is a dialogue without it, one is a page.
    folder: holds one file for each batch of rows. The same call continues where it was stopped.
    """

    def __init__(self, dense: Network, tokenizer: Tokenizer, end: int, folder: Path) -> None:
        self._dense, self._tokenizer, self._end, self._folder = dense, tokenizer, end, folder

    def rows(self, count: int, length: int, seed: int) -> Tensor:
        """Return tokens [count, length], sampled at temperature 1 from the likeliest."""
        self._folder.mkdir(parents=True, exist_ok=True)
        batches = []
        for at in range(-(-count // BATCH)):
            path = self._folder / f"{length}-{seed}-{at}.pt"
            if not path.exists():
                new = path.with_suffix(".new")
                torch.save(self._batch(length, torch.Generator().manual_seed(seed + at)), new)
                new.rename(path)
                print(f"dialogues: {(at + 1) * BATCH} of {count}", flush=True)
            batches.append(torch.load(path))
        return torch.cat(batches)[:count]

    def _batch(self, length: int, generator: torch.Generator) -> Tensor:
        dialogue = "<|im_start|>user\n"
        system = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n{dialogue}"
        starts = [self._ids(text) for text in (system, dialogue, system, "<|endoftext|>")]
        # The next tokens of each row, given before any is sampled.
        given = [iter(starts[row % len(starts)]) for row in range(BATCH)]
        turns = [0] * BATCH
        tokens = torch.zeros(BATCH, length, dtype=torch.long)
        decoder = _Decoder(self._dense, BATCH, length)
        sampled = tokens[:, 0].tolist()
        for at in range(length):
            for row in range(BATCH):
                token = next(given[row], None)
                if token is None:
                    token = sampled[row]
                    if token == self._end:
                        turns[row] += 1
                        given[row] = self._next_turn(turns[row])
                tokens[row, at] = token
            logits = decoder.step(tokens[:, at])
            best, ids = logits.topk(LIKELIEST, -1)
            drawn = torch.multinomial(best.softmax(-1), 1, generator=generator)
            sampled = ids.gather(1, drawn).flatten().tolist()
        return tokens

    def _next_turn(self, turns: int) -> Iterator[int]:
        """Return what follows the end of a turn: the start of the other one's."""
        return iter(self._ids("\n<|im_start|>" + ("assistant\n" if turns % 2 else "user\n")))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)


class _Decoder:
    """Keys and values of the dense network for B rows of at most T tokens, in bfloat16."""

    def __init__(self, network: Network, rows: int, tokens: int) -> None:
        shape = network.shape
        self._network, self._at = network, 0
        self._turns = turns_of(tokens, shape)
        sizes = (shape.layers, 2, rows, shape.kv_heads, tokens, shape.head_size)
        self._kept = torch.zeros(sizes, dtype=torch.bfloat16)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Read one token of each row, [B]. Returns the float32 logits of the next ones, [B, V]."""
        network = self._network
        with torch.autocast("cpu", torch.bfloat16):
            states = functional.embedding(tokens, network.embedding)
            for layer, kept in zip(network.layers, self._kept, strict=True):
                states = states + self._attention(layer, kept, normed(states, layer.input_norm, layer.shape.epsilon))
                states = states + layer.feed_forward(normed(states, layer.norm, layer.shape.epsilon))
            logits = network.logits(normed(states, network.norm, network.shape.epsilon))
        self._at += 1
        return logits.float()

    def _attention(self, layer: Layer, kept: Tensor, states: Tensor) -> Tensor:
        """Attention of one token of each row, [B, D] -> [B, D], over all tokens before it."""
        at, size = self._at, layer.shape.head_size
        turns = self._turns[:, at : at + 1]

        def heads(weight: Tensor) -> Tensor:
            return functional.linear(states, weight).view(len(states), -1, 1, size)

        kept[0, :, :, at : at + 1] = rotated(heads(layer.key), turns)
        kept[1, :, :, at : at + 1] = heads(layer.value)
        # The query heads that share a key head are rows of one product.
        query = rotated(heads(layer.query), turns).to(kept.dtype).view(len(states), layer.shape.kv_heads, -1, size)
        past = kept[:, :, :, : at + 1]
        mixed = functional.scaled_dot_product_attention(query, past[0], past[1])
        return functional.linear(mixed.flatten(1), layer.output)
