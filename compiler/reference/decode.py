"""Greedy decoding of many prompts at once. Drafts are verified in one pass.

A draft is a guess of the continuation. One forward pass over prompt and draft gives the greedy token at every position
of the draft. Up to the first difference, the draft equals the decoded tokens. Only the rest is decoded token by token,
in batches with a key/value cache.
Source: Fast Inference from Transformers via Speculative Decoding, section 2 (greedy case).
Shapes: B rows, T tokens, D hidden, H key/value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicLayer

from ..workspace.parallel import Workers
from .network import TOKENS_PER_FORWARD, Network, RowStates, length_batches

ROWS_PER_STEP = 64
"""Rows that are decoded together; two groups run at once. Larger groups gain little, because products dominate a step.
"""
_COMPACT_BELOW = 0.75
GROWTH_TOKENS = 64
"""Tokens by which the cache grows at once, because few continuations reach their limit."""
_STOP_WINDOW_TOKENS = 16
Decode = Callable[[list[int]], str]


@dataclass(eq=False)
class Continuation:
    """One prompt and its greedy continuation so far, without the end token.

    prompt: tokens of the prompt. With an encoder: the start of the decoder's text.
    draft: a guess of the continuation.
    limit: maximum number of new tokens.
    stop: texts that end the continuation.
    tokens: the continuation so far.
    done: the continuation is complete.
    source: tokens for the encoder, empty without one.
    states: keys and values of all known tokens but the last.
    source_states: keys and values of the encoder's output, per decoder layer.
    """

    prompt: list[int]
    draft: list[int]
    limit: int
    stop: tuple[str, ...] = ()
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    source: list[int] = field(default_factory=list)
    states: RowStates = field(default_factory=list, repr=False)
    source_states: RowStates = field(default_factory=list, repr=False)

    @property
    def cached(self) -> int:
        """Number of known tokens but the last, prompt included."""
        return len(self.prompt) + len(self.tokens) - 1


class GreedyDecoder:
    """Continues prompts with the most likely token until an end token, a stop text or the limit."""

    def __init__(self, network: Network, eos_token_ids: tuple[int, ...], decode: Decode) -> None:
        """decode: converts tokens to text; used to find stop texts."""
        self._network, self._decode = network, decode
        self._ends = frozenset(eos_token_ids)

    def run(self, items: Sequence[Continuation], pool: Workers, progress: Callable[[int, int], None]) -> None:
        """Complete every item in place.

        The tokens do not depend on drafts or on other items, apart from rounding. They are the same bits for any number
        of
        threads in the pool.
        """
        started = [item for item in items if item.limit > 0]
        for item in items:
            item.done = item.limit <= 0
        lengths = [len(item.source) + len(item.prompt) + len(item.draft) for item in started]
        batches = length_batches(lengths, TOKENS_PER_FORWARD)
        waiting: list[Continuation] = []
        decoding: list[Future[None]] = []
        for chosen in pool.in_order(self.verify, [[started[index] for index in batch] for batch in batches]):
            waiting += [item for item in chosen if not item.done]
            while len(waiting) >= ROWS_PER_STEP:
                decoding.append(pool.submit(self.decode_rows, waiting[:ROWS_PER_STEP]))
                del waiting[:ROWS_PER_STEP]
            progress(sum(item.done for item in items), len(items))
        if waiting:
            decoding.append(pool.submit(self.decode_rows, waiting))
        for rows in decoding:
            rows.result()
            progress(sum(item.done for item in items), len(items))

    @torch.inference_mode()
    def verify(self, items: Sequence[Continuation]) -> Sequence[Continuation]:
        """Run one pass over prompts and drafts. Keep the tokens that decoding would produce, and one token more.

        Returns the items.
        """
        cache = self._network.new_cache()
        rows, sources = [item.prompt + item.draft for item in items], [item.source for item in items]
        hidden = self._network.hidden(rows, cache, sources)
        spans = [hidden[row, item.cached : item.cached + len(item.draft) + 1] for row, item in enumerate(items)]
        best = self._network.best(torch.cat(spans))
        start = 0
        for row, item in enumerate(items):
            greedy = best[start : start + len(item.draft) + 1]
            start += len(greedy)
            same = next((i for i, token in enumerate(item.draft) if token != greedy[i]), len(item.draft))
            self._accept(item, greedy[: same + 1])
            if not item.done:
                found = self._network.row_states(cache, row, item.cached, len(item.source))
                item.states, item.source_states = found
        return items

    def _accept(self, item: Continuation, tokens: Sequence[int]) -> None:
        """Append greedy tokens until the item ends."""
        known = len(item.tokens)
        for token in tokens:
            if len(item.tokens) == item.limit or token in self._ends:
                item.done = True
                break
            item.tokens.append(token)
        item.done = item.done or len(item.tokens) >= item.limit
        if item.stop and len(item.tokens) > known:
            end = self._stop_end(item, known)
            if end is not None:
                del item.tokens[end:]
                item.done = True

    def _stop_end(self, item: Continuation, known: int) -> int | None:
        """Return the least number of tokens, above `known`, whose text contains a stop text, or None."""
        text = self._decode(item.tokens[max(0, known + 1 - _STOP_WINDOW_TOKENS) :])
        if not any(stop in text for stop in item.stop):
            return None
        for end in range(known + 1, len(item.tokens) + 1):
            text = self._decode(item.tokens[max(0, end - _STOP_WINDOW_TOKENS) : end])
            if any(stop in text for stop in item.stop):
                return end
        return None

    @torch.inference_mode()
    def decode_rows(self, items: list[Continuation]) -> None:
        """Decode token by token. Finished rows leave the batch once enough rows have finished."""
        width = max(item.cached for item in items)
        capacity = width + max(item.limit - len(item.tokens) for item in items)
        positions = torch.tensor([item.cached for item in items])
        mask = (torch.arange(capacity) >= (width - positions).unsqueeze(1)).long()
        layers: list[Any] = [
            _ReservedLayer([item.states[layer] for item in items], width) for layer in range(len(items[0].states))
        ]
        cache = self._network.decoding_cache(layers, [item.source_states for item in items])
        for item in items:
            item.states.clear()
            item.source_states.clear()
        tokens = torch.tensor([item.tokens[-1] for item in items])
        used = width
        while True:
            used += 1
            best = self._network.best(self._network.step(tokens, positions, mask[:, :used], cache))
            for item, token in zip(items, best, strict=True):
                if not item.done:
                    self._accept(item, [token])
            live = [row for row, item in enumerate(items) if not item.done]
            if not live:
                break
            tokens, positions = torch.tensor(best), positions + 1
            if len(live) <= _COMPACT_BELOW * len(items):
                keep = torch.tensor(live)
                items = [items[row] for row in live]
                tokens, positions, mask = tokens[keep], positions[keep], mask[keep]
                for layer in layers:
                    layer.batch_select_indices(keep)
                self._network.keep_rows(cache, keep)


class _ReservedLayer(DynamicLayer):  # type: ignore[misc, no-untyped-call]
    """Keys and values of one layer in reserved memory, [B, H, capacity, head size]. Rows are padded on the left.

    A new token is written into that memory. The cache of transformers would copy all keys and values at every step.
    """

    def __init__(self, states: Sequence[tuple[Tensor, Tensor]], width: int) -> None:
        """states: keys and values of each row, [H, T, head size]. All rows end at `width`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._used = width
        self._buffers = []
        for part in zip(*states, strict=True):
            heads, _, head_size = part[0].shape
            buffer = part[0].new_zeros((len(part), heads, width + GROWTH_TOKENS, head_size))
            for row, filled in enumerate(part):
                buffer[row, :, width - filled.shape[1] : width] = filled
            self._buffers.append(buffer)
        self.dtype, self.device, self.is_initialized = self._buffers[0].dtype, self._buffers[0].device, True
        self._expose()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and return all keys and values so far as views."""
        end = self._used + key_states.shape[2]
        if end > self._buffers[0].shape[2]:
            self._buffers = [functional.pad(buffer, (0, 0, 0, GROWTH_TOKENS)) for buffer in self._buffers]
        self._buffers[0][:, :, self._used : end] = key_states
        self._buffers[1][:, :, self._used : end] = value_states
        self._used = end
        return self._expose()

    def get_seq_length(self) -> int:
        """Return the number of positions in use, padding included."""
        return self._used

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self._buffers = [buffer[indices] for buffer in self._buffers]
        self._expose()

    def _expose(self) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[:, :, : self._used] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values
