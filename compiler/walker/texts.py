"""Texts on their way through the layers of a model, and the texts whose answers are scored.

Shapes: B rows of a batch, T tokens of the longest row, S tokens of the longest prompt, D hidden, A scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moec.evaluation.text_pairs import TokenPair
from moec.manifests.errors import InputError
from moec.manifests.model import ModelSpec

from ..reference.single_layer import Prompts

TOKENS_PER_FORWARD = 2048
"""Tokens of one forward pass. More tokens are slower on a CPU, because their activations exceed the cache."""
# `memory.py` computes bytes from these limits.
SCORED_TOKENS = 512
"""Maximum number of scored tokens of one text: its last."""
SKETCHES = 2
"""Gaussian vectors per text. Each needs one more backward pass. A quarter less variance would double the time."""
TOKENS_PER_BACKWARD = 512
"""Tokens of one pass with gradients. They bound its graph."""
LOGITS_AT_ONCE = 1 << 25
"""Logits of the checkpoint that a certificate holds at once (128 MiB)."""
LOGITS_PER_CHUNK = 1 << 22
"""Number of logits that a thread holds at once (16 MiB), where only sums over each row are needed."""

Embed = Callable[[Tensor], Tensor]
"""Token ids [...] -> residual stream [..., D]."""


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """Texts as tokens.

    rows: what the decoder reads.
    prompts: what an encoder reads, one for each row; empty without an encoder.
    """

    rows: list[list[int]]
    prompts: list[list[int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows and prompts."""
        return sum(map(len, self.rows)) + sum(map(len, self.prompts))

    def first(self, tokens: int) -> TokenTexts:
        """Return the first texts of at most this number of tokens, and at least one text."""
        count, left = 0, tokens - self.size(0)
        while count + 1 < len(self.rows) and left - self.size(count + 1) >= 0:
            count += 1
            left -= self.size(count)
        return TokenTexts(self.rows[: count + 1], self.prompts[: count + 1])

    def size(self, text: int) -> int:
        """Return the tokens of one text."""
        return len(self.rows[text]) + (len(self.prompts[text]) if self.prompts else 0)


@dataclass(frozen=True, slots=True)
class AnswerTexts:
    """Texts whose answers are scored.

    texts: their tokens. A row lacks the last token of its answer, which predicts nothing.
    counts: number of scored tokens, the last of each row.
    targets: the tokens that these predict.
    pairs: prompts and answers.
    tasks: number of texts of each task, task after task.
    """

    texts: TokenTexts
    counts: list[int]
    targets: list[list[int]]
    pairs: list[TokenPair]
    tasks: list[int]

    def first(self, count: int) -> AnswerTexts:
        """Return the first texts."""
        return self.select(range(min(count, len(self.counts))))

    def select(self, indices: Sequence[int]) -> AnswerTexts:
        """Return some texts. Their tasks are not counted."""
        prompts = [self.texts.prompts[at] for at in indices] if self.texts.prompts else []
        return AnswerTexts(
            TokenTexts([self.texts.rows[at] for at in indices], prompts),
            [self.counts[at] for at in indices],
            [self.targets[at] for at in indices],
            [self.pairs[at] for at in indices],
            [],
        )


def divided_pairs(model: ModelSpec, pairs: Sequence[TokenPair]) -> tuple[list[list[int]], list[TokenPair]]:
    """Split each pair into the tokens for an encoder and the pair for the decoder.

    Without an encoder its tokens are empty, and the pairs do not change.
    Raises InputError if an encoder's prompt is empty.
    """
    if model.encoder is None:
        return [], list(pairs)
    if not all(prompt for prompt, _ in pairs):
        raise InputError("a prompt is empty, and the model has an encoder that reads it", "take a task with prompts")
    start = model.encoder.start_token_id
    return [prompt for prompt, _ in pairs], [([start], answer) for _, answer in pairs]


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return token ids [B, T] with zeros on the right, and a mask of real tokens, [B, T] of 0 and 1."""
    width = max(len(row) for row in rows)
    ids, real = torch.zeros((len(rows), width), dtype=torch.long), torch.zeros((len(rows), width), dtype=torch.long)
    for at, row in enumerate(rows):
        ids[at, : len(row)], real[at, : len(row)] = torch.tensor(row, dtype=torch.long), 1
    return ids, real


def length_batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Group indices into batches of similar length, longest first.

    A batch has at most `tokens` tokens, padding included. A longer row forms its own batch. Ties keep the input order.
    """
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or (len(batches[-1]) + 1) * width > tokens:
            batches.append([])
            width = lengths[index]
        batches[-1].append(index)
    return batches


def text_batches(texts: TokenTexts, tokens_per_batch: int = TOKENS_PER_FORWARD) -> list[list[int]]:
    """Return the indices of the texts of each batch, longest texts first."""
    return length_batches([texts.size(at) for at in range(len(texts.rows))], tokens_per_batch)


@dataclass(slots=True)
class TextStates:
    """Texts between two layers.

    batches: indices of the texts of each batch. Rows of a batch are padded on the right.
    states: residual stream of each batch, [B, T, D]; [B, S, D] while the encoder reads the prompts.
    embed: how the decoder's tokens are embedded; None once they are. It may hold a table of the whole vocabulary.
    encoded: the encoder's output of each batch, [B, S, D]; empty without an encoder, and while it reads.
    """

    texts: TokenTexts
    batches: list[list[int]]
    states: list[Tensor]
    embed: Embed | None = None
    encoded: list[Tensor] = field(default_factory=list)

    @classmethod
    def begin(cls, texts: TokenTexts, embed: Embed, tokens_per_batch: int = TOKENS_PER_FORWARD) -> TextStates:
        """Return the texts before the first layer."""
        batches = text_batches(texts, tokens_per_batch)
        first = texts.prompts or texts.rows
        states = [embed(padded([first[at] for at in batch])[0]) for batch in batches]
        return cls(texts, batches, states, embed if texts.prompts else None)

    @property
    def is_encoding(self) -> bool:
        """True while the encoder reads the prompts."""
        return bool(self.texts.prompts) and not self.encoded

    @property
    def num_moving(self) -> int:
        """Number of tokens that pass the current stack."""
        return sum(sum(self.lengths(at)) for at in range(len(self.batches)))

    def begin_decoding(self, norm: Callable[[Tensor], Tensor]) -> None:
        """Keep what the encoder made of the prompts, and continue with the decoder's tokens before its first layer."""
        if self.embed is None:
            raise ValueError("the decoder has begun")
        self.encoded = [norm(state) for state in self.states]
        self.states = [self.embed(padded([self.texts.rows[at] for at in batch])[0]) for batch in self.batches]
        self.embed = None

    def copy(self) -> TextStates:
        """Return the same texts between the same layers, with states of their own."""
        states = [state.clone() for state in self.states]
        return TextStates(self.texts, self.batches, states, self.embed, list(self.encoded))

    def tensors(self) -> Iterator[tuple[list[Tensor], int]]:
        """Yield where every tensor stands that a resumed run needs: list and index."""
        for states in (self.states, self.encoded):
            yield from ((states, at) for at in range(len(states)))

    def prompts(self, batch: int) -> Prompts | None:
        """Return what the encoder has read of a batch, or reads; None without an encoder."""
        if not self.texts.prompts:
            return None
        real = padded([self.texts.prompts[at] for at in self.batches[batch]])[1]
        return Prompts(real, self.encoded[batch] if self.encoded else None)

    def lengths(self, batch: int) -> list[int]:
        """Return the number of tokens of each text of a batch that pass the current stack."""
        passing = self.texts.prompts if self.is_encoding else self.texts.rows
        return [len(passing[at]) for at in self.batches[batch]]

    def real(self, batch: int) -> Tensor:
        """Return which positions of a batch hold tokens, bool [B * T]."""
        lengths = torch.tensor(self.lengths(batch))
        return (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).reshape(-1)

    def text_of_token(self) -> Tensor:
        """Return the index of the text of each real token, in the order of `tokens`, int64 [N]."""
        every = [(index, length) for at in range(len(self.batches)) for index, length in self._sizes(at)]
        indices, lengths = (torch.tensor(column) for column in zip(*every, strict=True))
        return indices.repeat_interleave(lengths)

    def _sizes(self, batch: int) -> Iterator[tuple[int, int]]:
        return zip(self.batches[batch], self.lengths(batch), strict=True)

    def tokens(self) -> Tensor:
        """Return the residual stream of all real tokens, in the order of the batches, [N, D]."""
        width = self.states[0].shape[-1]
        return torch.cat([state.reshape(-1, width)[self.real(at)] for at, state in enumerate(self.states)])

    def scored_states(self, counts: Sequence[int]) -> Tensor:
        """Return the residual stream of the last counts[i] tokens of each row i, rows in order, [A, D]."""
        spans: list[Tensor] = [torch.empty(0)] * len(self.texts.rows)
        for batch, state in zip(self.batches, self.states, strict=True):
            for at, index in enumerate(batch):
                length = len(self.texts.rows[index])
                spans[index] = state[at, length - counts[index] : length]
        return torch.cat(spans)
