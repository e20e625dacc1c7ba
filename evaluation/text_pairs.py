"""Convert prompts and answers to tokens in one way for every engine, so that all get the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .tasks.prompt_forms import RenderedPrompt

TokenPair = tuple[list[int], list[int]]
"""Token ids of a prompt and of its answer."""


class Encoded(Protocol):
    """One text as tokens."""

    @property
    def ids(self) -> list[int]:
        """Token ids."""


class Encoder(Protocol):
    """A tokenizer of the tokenizers library, or one that bounds it."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> Encoded:
        """Return the tokens of a text."""

    def encode_batch(self, texts: list[str], /, *, add_special_tokens: bool = True) -> Sequence[Encoded]:
        """Return the tokens of some texts."""


def encode_pairs(tokenizer: Encoder, pairs: Sequence[tuple[str, str]], is_joint: bool = True) -> list[TokenPair]:
    """Return the tokens of prompts and answers. An answer has the tokens that the joint text adds to the prompt's.

    The answer is encoded by itself, without special tokens, in two cases: the two texts share a token, or the prompt is
    for an encoder.
    is_joint: False if the prompt is for an encoder.
    """
    if not is_joint:
        prompt_ids = _encoded(tokenizer, pairs, [prompt for prompt, _ in pairs])
        answers = tokenizer.encode_batch([answer for _, answer in pairs], add_special_tokens=False)
        return [(ids, answer.ids) for ids, answer in zip(prompt_ids, answers, strict=True)]
    prompts = _encoded(tokenizer, pairs, [prompt for prompt, _ in pairs])
    joint = _encoded(tokenizer, pairs, [prompt + answer for prompt, answer in pairs])
    encoded = []
    for (_, answer), before, both in zip(pairs, prompts, joint, strict=True):
        if both[: len(before)] == before:
            encoded.append((before, both[len(before) :]))
        else:
            encoded.append((before, tokenizer.encode(answer, add_special_tokens=False).ids))
    return encoded


def _encoded(tokenizer: Encoder, pairs: Sequence[tuple[str, str]], texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of a text of each pair. Special tokens are added, but not to a rendered prompt."""
    rows: list[list[int]] = [[] for _ in texts]
    for is_rendered in (False, True):
        indices = [at for at, (prompt, _) in enumerate(pairs) if isinstance(prompt, RenderedPrompt) == is_rendered]
        if indices:
            encodings = tokenizer.encode_batch([texts[at] for at in indices], add_special_tokens=not is_rendered)
            for at, encoding in zip(indices, encodings, strict=True):
                rows[at] = encoding.ids
    return rows


def forced_rows(
    pairs: Sequence[TokenPair], end_token_ids: Sequence[int]
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Return the rows of a teacher-forced pass, the answers, and how many tokens of each answer are scored.

    end_token_ids: added after every answer. A row lacks the last token, which predicts nothing.
    """
    answers = [[*answer, *end_token_ids] for _, answer in pairs]
    rows = [(prompt + answer)[:-1] for (prompt, _), answer in zip(pairs, answers, strict=True)]
    return rows, answers, [min(len(answer), len(row)) for answer, row in zip(answers, rows, strict=True)]
