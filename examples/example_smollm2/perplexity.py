"""Perplexity of networks in torch, and rows of tokens."""

import math
import random
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from example_smollm2.network import Network
from example_smollm2.prose import Document


def rows_of(documents: Sequence[Document], tokenizer: Tokenizer, length: int, seed: int) -> Tensor:
    """Return rows of tokens [B, length] from documents, in a random order. A row is a part of one document."""
    texts = ["\n\n".join(document.paragraphs) for document in documents]
    rows = []
    for encoding in tokenizer.encode_batch(texts):
        usable = len(encoding.ids) // length * length
        rows += [encoding.ids[start : start + length] for start in range(0, usable, length)]
    random.Random(seed).shuffle(rows)
    return torch.tensor(rows)


@torch.inference_mode()
def perplexity(network: Network, rows: Tensor, batch: int = 8) -> float:
    """Return exp of the mean loss of the tokens after the first of each row."""
    total, count = 0.0, 0
    for part in rows.split(batch):
        with torch.autocast("cpu", torch.bfloat16):
            states = network(part)[:, :-1].flatten(0, 1)
            logits = network.logits(states)
        targets = part[:, 1:].flatten()
        total += functional.cross_entropy(logits.float(), targets, reduction="sum").item()
        count += len(targets)
    return math.exp(total / count)
