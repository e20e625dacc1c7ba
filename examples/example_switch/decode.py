"""Greedy decoding in batches."""

from collections.abc import Sequence

import torch
from example_model.decode import END, PAD, by_length, identity
from example_model.items import prompt_of
from tokenizers import Tokenizer
from torch import Tensor

from example_switch.model import SwitchModel

TASK = "samsum"
LONGEST_ANSWER = 40


def pad_right(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return rows as one matrix [B, T], and which places are not padding, bool [B, T]."""
    length = max(map(len, rows))
    tokens = torch.tensor([[*row, *[pad] * (length - len(row))] for row in rows])
    return tokens, torch.arange(length) < torch.tensor([[len(row)] for row in rows])


@torch.no_grad()
def decode_batch(model: SwitchModel, prompts: Sequence[Sequence[int]], start: int, end: int) -> list[list[int]]:
    """Answer every prompt until the end token. Each step runs the decoder over all of the answers so far."""
    memory, hidden, _ = model.encode(*pad_right(prompts, start))
    rows = list(range(len(prompts)))
    tokens = torch.full((len(prompts), 1), start)
    written: list[list[int]] = [[] for _ in prompts]
    for _ in range(LONGEST_ANSWER):
        last = torch.arange(len(rows)) * tokens.shape[1] + tokens.shape[1] - 1
        best = model.decode(tokens, memory, hidden, last)[0].argmax(-1)
        going = [place for place, token in enumerate(best.tolist()) if token != end]
        if not going:
            break
        for place in going:
            written[rows[place]].append(int(best[place]))
        if len(going) < len(rows):
            kept = torch.tensor(going)
            rows = [rows[place] for place in going]
            memory = [(key[kept], value[kept]) for key, value in memory]
            tokens, hidden, best = tokens[kept], hidden[kept], best[kept]
        tokens = torch.cat((tokens, best[:, None]), dim=1)
    return written


def answers(model: SwitchModel, tokenizer: Tokenizer, items: Sequence[dict[str, str]], batch: int = 128) -> list[str]:
    """Return the answer of the model to each item."""
    start, end = identity(tokenizer, PAD), identity(tokenizer, END)
    texts = [prompt_of(TASK, item["dialogue"]) for item in items]
    prompts = [encoded.ids for encoded in tokenizer.encode_batch(texts)]
    return by_length(prompts, batch, lambda chunk: decode_batch(model, chunk, start, end), tokenizer)
