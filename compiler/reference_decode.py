"""Greedy decoding of many prompts at once, with drafts verified in one pass.

A draft is a guess of the continuation. One forward pass over prompt and draft gives the greedy token at every place of
it; up to the first difference they are what decoding would have produced. Only what differs is decoded token by token,
in batches with a key/value cache.
Source: Fast Inference from Transformers via Speculative Decoding, section 2 (greedy case).
Shapes: B rows, T tokens, D hidden, H key/value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from .reference_network import TOKENS_PER_FORWARD, Network, length_batches

ROWS_PER_STEP = 128
"""Rows decoded together: more gain little, since a step then costs what its products cost."""
DRAFT_ROUNDS = 2
"""Passes over a draft: after a difference, the rest of the draft is tried once more behind the token found instead."""
_COMPACT_BELOW = 0.75
_STOP_WINDOW_TOKENS = 16
Decode = Callable[[list[int]], str]


@dataclass(eq=False)
class Continuation:
    """One prompt and what greedy decoding has produced for it so far, the end token left out.

    limit: most new tokens. draft: guess of the tokens that follow `tokens`. done: nothing more is to come.
    """

    prompt: list[int]
    draft: list[int]
    limit: int
    stop: tuple[str, ...] = ()
    tokens: list[int] = field(default_factory=list)
    done: bool = False

    @property
    def length(self) -> int:
        """Tokens known so far, prompt included."""
        return len(self.prompt) + len(self.tokens)


class GreedyDecoder:
    """Continues prompts with the most likely token until an end token, a stop text or the limit."""

    def __init__(self, network: Network, eos_token_ids: tuple[int, ...], decode: Decode) -> None:
        """decode: tokens -> text, used to find stop texts."""
        self._network, self._decode = network, decode
        self._ends = frozenset(eos_token_ids)

    @torch.inference_mode()
    def run(self, items: Sequence[Continuation], progress: Callable[[int, int], None]) -> None:
        """Complete every item in place. The tokens do not depend on drafts or on the other items, rounding aside."""

        def report() -> None:
            progress(sum(item.done for item in items), len(items))

        for item in items:
            self._accept(item, [])
        for _ in range(DRAFT_ROUNDS):
            drafted = [item for item in items if item.draft and not item.done]
            for batch in length_batches([item.length + len(item.draft) for item in drafted], TOKENS_PER_FORWARD):
                self._verify([drafted[index] for index in batch])
                report()
        left = [item for item in items if not item.done]
        for batch in length_batches([item.length for item in left], TOKENS_PER_FORWARD * ROWS_PER_STEP, ROWS_PER_STEP):
            self._decode_rows([left[index] for index in batch], report)

    def _verify(self, items: Sequence[Continuation]) -> None:
        """One pass over prompts and drafts: keep what decoding would have produced, and one token more."""
        hidden = self._network.hidden([item.prompt + item.tokens + item.draft for item in items])
        spans = [hidden[row, item.length - 1 : item.length + len(item.draft)] for row, item in enumerate(items)]
        best = self._network.best(torch.cat(spans))
        start = 0
        for item in items:
            greedy = best[start : start + len(item.draft) + 1]
            start += len(greedy)
            same = next((i for i, token in enumerate(item.draft) if token != greedy[i]), len(item.draft))
            item.draft = item.draft[same + 1 :]
            self._accept(item, greedy[: same + 1])

    def _accept(self, item: Continuation, tokens: Sequence[int]) -> None:
        """Append greedy tokens up to where the item ends."""
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
        """The fewest tokens, more than `known`, whose text ends with or holds a stop text; None where there is none."""
        text = self._decode(item.tokens[max(0, known + 1 - _STOP_WINDOW_TOKENS) :])
        if not any(stop in text for stop in item.stop):
            return None
        for end in range(known + 1, len(item.tokens) + 1):
            text = self._decode(item.tokens[max(0, end - _STOP_WINDOW_TOKENS) : end])
            if any(stop in text for stop in item.stop):
                return end
        return None

    def _decode_rows(self, items: list[Continuation], report: Callable[[], None]) -> None:
        """Decode token by token; rows that end leave the batch when enough of them have."""
        width = max(item.length for item in items)
        capacity = width + max(item.limit - len(item.tokens) for item in items)
        positions = torch.tensor([item.length for item in items])
        mask = (torch.arange(capacity) >= (width - positions).unsqueeze(1)).long()
        cache, tokens = self._prefill(items, width, capacity)
        used = width
        while True:
            for item, token in zip(items, tokens.tolist(), strict=True):
                if not item.done:
                    self._accept(item, [token])
            live = [row for row, item in enumerate(items) if not item.done]
            if not live:
                break
            if len(live) <= _COMPACT_BELOW * len(items):
                report()
                keep = torch.tensor(live)
                items = [items[row] for row in live]
                tokens, positions, mask = tokens[keep], positions[keep], mask[keep]
                for layer in cache.layers:
                    layer.batch_select_indices(keep)
            used += 1
            hidden = self._network.step(tokens, positions, mask[:, :used], cache)
            tokens = torch.tensor(self._network.best(hidden))
            positions = positions + 1
        report()

    def _prefill(self, items: Sequence[Continuation], width: int, capacity: int) -> tuple[Any, Tensor]:
        """Run all known tokens: the cache, rows ending together at `width`, and the next token of each row [B]."""
        layers: list[Any] = [_FixedLayer(len(items), width, capacity) for _ in self._network.experts]
        tokens = torch.zeros(len(items), dtype=torch.long)
        for batch in length_batches([item.length for item in items], TOKENS_PER_FORWARD):
            chosen = [items[row] for row in batch]
            part: Any = DynamicCache()
            hidden = self._network.hidden([item.prompt + item.tokens for item in chosen], part)
            last = torch.tensor([item.length - 1 for item in chosen])
            tokens[batch] = torch.tensor(self._network.best(hidden[torch.arange(len(chosen)), last]))
            for layer, filled in zip(layers, part.layers, strict=True):
                layer.place(batch, [item.length for item in chosen], filled.keys, filled.values)
        return Cache(layers=layers), tokens


class _FixedLayer(DynamicLayer):  # type: ignore[misc, no-untyped-call]
    """Keys and values of one layer in memory taken once, [B, H, capacity, head size]; rows are padded on the left.

    Appending a token writes into that memory, where transformers' own cache would copy all of it at every step.
    """

    def __init__(self, rows: int, width: int, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows, self._capacity, self._used = rows, capacity, width

    def place(self, rows: Sequence[int], lengths: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Copy rows that are padded on the right, [b, H, T, head size], to the end of the prefilled part."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            self._buffers[0][row, :, self._used - length : self._used] = keys[index, :, :length]
            self._buffers[1][row, :, self._used - length : self._used] = values[index, :, :length]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the memory."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._buffers = tuple(
            states.new_zeros((self._rows, states.shape[1], self._capacity, states.shape[3]))
            for states in (key_states, value_states)
        )
        self.is_initialized = True
        self._expose()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and return everything up to here as views."""
        end = self._used + key_states.shape[2]
        self._buffers[0][:, :, self._used : end] = key_states
        self._buffers[1][:, :, self._used : end] = value_states
        self._used = end
        return self._expose()

    def get_seq_length(self) -> int:
        """Places in use, padding included."""
        return self._used

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self._buffers = tuple(buffer[indices] for buffer in self._buffers)
        self._expose()

    def _expose(self) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[:, :, : self._used] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values
