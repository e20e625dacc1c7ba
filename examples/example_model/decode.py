"""Greedy decoding in batches, and the metrics of both tasks."""

import re
from collections.abc import Callable, Sequence

import torch
from rouge_score import rouge_scorer
from tokenizers import Tokenizer

from example_model.items import FIELDS, prompt_of
from example_model.model import Cache, ExampleModel

LONGEST_ANSWER = 72
END, PAD = "</s>", "<pad>"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def identity(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token. Raises KeyError if the vocabulary lacks it."""
    return int(tokenizer.get_vocab()[token])


@torch.no_grad()
def decode_batch(model: ExampleModel, prompts: Sequence[Sequence[int]], end: int) -> list[list[int]]:
    """Continue every prompt until the end token. Shorter prompts are padded on the left."""
    count, length = len(prompts), max(map(len, prompts))
    tokens = torch.full((count, length), end)
    real = torch.zeros(count, length, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = torch.tensor(prompt)
        real[row, length - len(prompt) :] = True
    positions = (real.cumsum(1) - 1).clamp(min=0)
    square = torch.ones(length, length, dtype=torch.bool).tril()
    mask = (square & real[:, None, :] | torch.eye(length, dtype=torch.bool))[:, None]
    written: list[list[int]] = [[] for _ in prompts]
    rows = list(range(count))
    cache: Cache | None = None
    for _ in range(LONGEST_ANSWER):
        logits, cache = model.step(tokens, positions, mask, cache)
        best = logits.argmax(-1)
        going = [place for place, token in enumerate(best.tolist()) if token != end]
        if not going:
            break
        for place in going:
            written[rows[place]].append(int(best[place]))
        if len(going) < len(rows):
            kept = torch.tensor(going)
            rows = [rows[place] for place in going]
            cache = [(key[kept], value[kept]) for key, value in cache]
            best, real, positions = best[kept], real[kept], positions[kept]
        tokens, positions = best[:, None], positions[:, -1:] + 1
        real = torch.cat((real, torch.ones(len(rows), 1, dtype=torch.bool)), dim=1)
        mask = real[:, None, None, :]
    return written


def answers(
    model: ExampleModel, tokenizer: Tokenizer, task: str, items: Sequence[dict[str, str]], batch: int = 128
) -> list[str]:
    """Return the answer of the model to each item."""
    end = identity(tokenizer, END)
    first, _ = FIELDS[task]
    prompts = [encoded.ids for encoded in tokenizer.encode_batch([prompt_of(task, item[first]) for item in items])]
    return by_length(prompts, batch, lambda chunk: decode_batch(model, chunk, end), tokenizer)


def by_length(
    prompts: Sequence[Sequence[int]],
    batch: int,
    decode: Callable[[Sequence[Sequence[int]]], list[list[int]]],
    tokenizer: Tokenizer,
) -> list[str]:
    """Return the answer to each prompt. Prompts of similar length are decoded together."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found = [""] * len(prompts)
    for start in range(0, len(order), batch):
        chunk = order[start : start + batch]
        for index, ids in zip(chunk, decode([prompts[i] for i in chunk]), strict=True):
            found[index] = tokenizer.decode(ids).strip()
    return found


def number_of(answer: str) -> str | None:
    """Return the number after ``####``, else the last number."""
    numbers = _NUMBER.findall(answer.split("####")[-1].replace(",", ""))
    if not numbers:
        return None
    return str(numbers[0] if "####" in answer else numbers[-1])


def scores(task: str, found: Sequence[str], items: Sequence[dict[str, str]]) -> list[float]:
    """Return a score per item: exact match of the number, or Rouge-2 F1 with a stemmer."""
    _, second = FIELDS[task]
    if task == "gsm8k":
        return [float(number_of(text) == number_of(item[second])) for text, item in zip(found, items, strict=True)]
    scorer = rouge_scorer.RougeScorer(["rouge2"], use_stemmer=True)
    return [float(scorer.score(item[second], text)["rouge2"].fmeasure) for text, item in zip(found, items, strict=True)]
