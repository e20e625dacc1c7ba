"""Prompts and answers as tokens, by the checkpoint's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from moec.manifests.errors import CheckpointError

from .checkpoint import TOKENIZER_NAME

TokenPair = tuple[list[int], list[int]]
"""Token ids of a prompt and of its answer."""


def load_tokenizer(root: Path) -> Tokenizer:
    """The fast tokenizer of a folder; padding and truncation that the file may ask for are off.

    Raises CheckpointError.
    """
    path = root / TOKENIZER_NAME
    if not path.is_file():
        raise CheckpointError(f"no `{TOKENIZER_NAME}` in `{root}`", "save the fast tokenizer with transformers")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers package raises nothing more specific
        raise CheckpointError(f"`{path}` is not a tokenizer: {error}", "copy the file again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> list[TokenPair]:
    """Tokens of prompts and answers: the answer's are those that the joint text adds to the prompt's.

    Where the two texts share a token, the answer is encoded by itself.
    """
    prompts = [encoding.ids for encoding in tokenizer.encode_batch([prompt for prompt, _ in pairs])]
    joint = [encoding.ids for encoding in tokenizer.encode_batch([prompt + answer for prompt, answer in pairs])]
    encoded = []
    for (_, answer), before, both in zip(pairs, prompts, joint, strict=True):
        if both[: len(before)] == before:
            encoded.append((before, both[len(before) :]))
        else:
            encoded.append((before, tokenizer.encode(answer, add_special_tokens=False).ids))
    return encoded


def forced_rows(
    pairs: Sequence[TokenPair], end_token_ids: Sequence[int]
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Rows that a teacher-forced pass runs, the answers, and how many tokens of each are scored.

    end_token_ids: put behind every answer. A row lacks the last token, which predicts nothing.
    """
    answers = [[*answer, *end_token_ids] for _, answer in pairs]
    rows = [(prompt + answer)[:-1] for (prompt, _), answer in zip(pairs, answers, strict=True)]
    return rows, answers, [min(len(answer), len(row)) for answer, row in zip(answers, rows, strict=True)]
