"""Train the example model: ``python -m example_model.train``. The same command continues a run that was stopped.

Every 125 steps the state goes to ``--state``. The model is then scored on a part of the validation splits, and goes to
``--model`` if it is no worse than before. The log has one JSON object per line.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from example_model.checkpoint import write_configs, write_weights
from example_model.decode import END, PAD, answers, identity, scores
from example_model.items import SEED, TrainingText, drills, training_texts
from example_model.make_data import DATA
from example_model.make_tokenizer import MODEL
from example_model.model import ExampleModel, Shape
from example_model.training_run import TrainingRun, main

COUNTS = {"gsm8k": 94_000, "samsum": 50_000, "drill": 17_000}
BATCH_TOKENS = 1_500
CHUNK_ITEMS = 2_400
STEPS, WARM_UP, DECAY = 750, 100, 250
RATE, WEIGHT_DECAY, BALANCE = 1e-3, 0.1, 0.01
SCORE_EVERY = 125
SCORED = {"gsm8k": 200, "samsum": 100}


@dataclass(frozen=True)
class Sequence:
    """Tokens, and the places whose next token the model learns to predict."""

    tokens: list[int]
    wanted: list[int]


def sums_only(answer: list[int], equals: int, stop: int) -> list[int]:
    """Return the wanted places of a drill: those from ``=`` to the full stop. Its other numbers cannot be predicted."""
    wanted, inside = [], False
    for place, token in enumerate(answer[:-1]):
        inside = token == equals or (inside and token != stop)
        if inside:
            wanted.append(place)
    return wanted


def tokenise(tokenizer: Tokenizer, texts: list[TrainingText]) -> list[Sequence]:
    """Turn texts into sequences. The end token is part of the answer."""
    end, equals, stop = (identity(tokenizer, token) for token in (END, "=", "."))
    prompts = tokenizer.encode_batch([text.prompt for text in texts])
    tails = tokenizer.encode_batch([text.answer for text in texts])
    found = []
    for text, prompt, tail in zip(texts, prompts, tails, strict=True):
        tokens = [*prompt.ids, *tail.ids, end]
        if text.task == "drill":
            found.append(Sequence(tokens, sums_only(tokens, equals, stop)))
        else:
            found.append(Sequence(tokens, list(range(len(prompt.ids) - 1, len(tokens) - 1))))
    return found


def curriculum(tokenizer: Tokenizer) -> list[list[Sequence]]:
    """Return all batches in order: mixed tasks, more drills at first, sequences of similar length together."""
    rng = random.Random(f"{SEED} order")
    keyed = []
    for task, count in COUNTS.items():
        texts = drills(count) if task == "drill" else training_texts(task, count)
        power = 2.0 if task == "drill" else 1.0
        keyed += [(rng.random() ** power, sequence) for sequence in tokenise(tokenizer, texts)]
    ordered = [sequence for _, sequence in sorted(keyed, key=lambda pair: pair[0])]
    batches: list[list[Sequence]] = []
    for start in range(0, len(ordered), CHUNK_ITEMS):
        chunk = sorted(ordered[start : start + CHUNK_ITEMS], key=lambda sequence: len(sequence.tokens))
        filled: list[list[Sequence]] = [[]]
        for sequence in chunk:
            if (len(filled[-1]) + 1) * len(sequence.tokens) > BATCH_TOKENS:
                filled.append([])
            filled[-1].append(sequence)
        rng.shuffle(filled)
        batches += filled
    return batches


def tensors_of(batch: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens [B, T] padded on the right, wanted places [N] in the flat batch, and their next tokens [N]."""
    length = max(len(sequence.tokens) for sequence in batch)
    tokens = torch.zeros(len(batch), length, dtype=torch.long)
    places, targets = [], []
    for row, sequence in enumerate(batch):
        tokens[row, : len(sequence.tokens)] = torch.tensor(sequence.tokens)
        places += [row * length + place for place in sequence.wanted]
        targets += [sequence.tokens[place + 1] for place in sequence.wanted]
    return tokens, torch.tensor(places), torch.tensor(targets)


def rate_at(step: int) -> float:
    """Return the learning rate: it warms up, stays constant, and falls to zero."""
    return RATE * min(1.0, (step + 1) / WARM_UP, (STEPS - step) / DECAY)


@torch.no_grad()
def liken(embedding: torch.Tensor, tokenizer: Tokenizer) -> None:
    """Start a word with a space before it close to the same word without it, because names occur in both forms."""
    vocabulary = tokenizer.get_vocab()
    space = embedding[identity(tokenizer, "Ġ")].clone()
    for token, place in vocabulary.items():
        bare = vocabulary.get(token[1:]) if token[0] == "Ġ" else None
        if bare is not None:
            embedding[place] = 0.8 * embedding[bare] + 0.6 * space


class Run(TrainingRun):
    """The training of the first example.

    shape: sizes of the model.
    has_spread_channels: whether channels start with unequal sizes.
    """

    steps, score_every = STEPS, SCORE_EVERY
    shape, has_spread_channels = Shape(), True

    def __init__(self, state: Path, log: Path, folder: Path, rank: int = 0) -> None:
        torch.manual_seed(SEED)
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        model = ExampleModel(self.shape)
        model.initialise(torch.Generator().manual_seed(SEED), self.has_spread_channels)
        liken(model.embed, self.tokenizer)
        matrices = [weight for weight in model.parameters() if weight.ndim > 1]
        vectors = [weight for weight in model.parameters() if weight.ndim == 1]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), fused=True)
        super().__init__(model, optimizer, state, log, rank)
        if rank == 0:
            write_configs(folder, self.shape, identity(self.tokenizer, END), identity(self.tokenizer, PAD))

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return rate_at(step)

    def learn(self, batch: list[Sequence]) -> tuple[float, float]:
        """Take one step. Return the loss on the wanted tokens and the load balancing loss."""
        tokens, places, targets = tensors_of(batch)
        logits, balance = self.model(tokens, places)
        loss = functional.cross_entropy(logits, targets)
        self.descend(loss + BALANCE * balance, sum(len(sequence.tokens) for sequence in batch))
        return loss.item(), balance.item()

    def score(self) -> None:
        """Score a part of the validation splits, and export the model if it is no worse than before."""
        results = {}
        for task, count in SCORED.items():
            lines = (DATA / task / "validation.jsonl").read_text(encoding="utf-8").splitlines()[:count]
            items = [json.loads(line) for line in lines]
            found = scores(task, answers(self.model, self.tokenizer, task, items), items)
            results[task] = sum(found) / len(found)
        self.write(exact_match=results["gsm8k"], rouge2=results["samsum"])
        if sum(results.values()) >= self.best:
            self.best = sum(results.values())
            write_weights(self.folder, self.model)


if __name__ == "__main__":
    main("Train the example model.", Run, curriculum, "example-train", "train.log", MODEL)
