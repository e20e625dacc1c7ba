"""Train the second example: ``python -m example_switch.train``. The same command continues a run that was stopped.

Every 100 steps the state goes to ``--state``. The model is then scored on a part of the validation split, and goes to
``--model`` if it is no worse than before. The log has one JSON object per line.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from example_model.decode import END, PAD, identity, scores
from example_model.items import SEED, TrainingText, training_texts
from example_model.make_data import DATA
from example_model.train import liken
from example_model.training_run import TrainingRun, main
from tokenizers import Tokenizer
from torch.nn import functional

from example_switch.checkpoint import FIRST_MODEL, MODEL, write_configs, write_weights
from example_switch.decode import TASK, answers, pad_right
from example_switch.model import SwitchModel, SwitchShape

COUNT = 24_000
BATCH_TOKENS = 1_600
CHUNK_ITEMS = 2_400
STEPS, WARM_UP, DECAY = 400, 100, 150
RATE, WEIGHT_DECAY, BALANCE = 1e-3, 0.1, 0.01
# Factor of the learning rate of biases by distance. They are added to scores that are several units large, and start
# as large.
DISTANCE_RATE = 10
SCORE_EVERY = 100
SCORED = 200


@dataclass(frozen=True)
class Pair:
    """Tokens of a prompt and of its answer, the end token included."""

    prompt: list[int]
    answer: list[int]


def tokenise(tokenizer: Tokenizer, texts: list[TrainingText]) -> list[Pair]:
    """Turn texts into tokens."""
    end = identity(tokenizer, END)
    prompts = tokenizer.encode_batch([text.prompt for text in texts])
    tails = tokenizer.encode_batch([text.answer for text in texts])
    return [Pair(prompt.ids, [*tail.ids, end]) for prompt, tail in zip(prompts, tails, strict=True)]


def curriculum(tokenizer: Tokenizer) -> list[list[Pair]]:
    """Return all batches in order, pairs of similar length together."""
    rng = random.Random(f"{SEED} order")
    pairs = tokenise(tokenizer, training_texts(TASK, COUNT))
    batches: list[list[Pair]] = []
    for start in range(0, len(pairs), CHUNK_ITEMS):
        chunk = sorted(pairs[start : start + CHUNK_ITEMS], key=lambda pair: (len(pair.prompt) // 3, len(pair.answer)))
        filled: list[list[Pair]] = [[]]
        for pair in chunk:
            if (len(filled[-1]) + 1) * (len(pair.prompt) + len(pair.answer)) > BATCH_TOKENS:
                filled.append([])
            filled[-1].append(pair)
        rng.shuffle(filled)
        batches += filled
    return batches


def tensors_of(batch: list[Pair], start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tensors of a batch.

    They are the prompts [B, S], their places that are not padding [B, S], the decoder's inputs [B, T], and the tokens
    [N] that it should write.
    """
    prompts, is_real = pad_right([pair.prompt for pair in batch], start)
    read, _ = pad_right([[start, *pair.answer[:-1]] for pair in batch], start)
    return prompts, is_real, read, torch.tensor([token for pair in batch for token in pair.answer])


def places_of(batch: list[Pair]) -> torch.Tensor:
    """Return the places [N] in the flat batch at which the decoder writes its wanted tokens."""
    length = max(len(pair.answer) for pair in batch)
    return torch.tensor([row * length + place for row, pair in enumerate(batch) for place in range(len(pair.answer))])


def rate_at(step: int) -> float:
    """Return the learning rate: it warms up, stays constant, and falls to zero."""
    return RATE * min(1.0, (step + 1) / WARM_UP, (STEPS - step) / DECAY)


def optimizer_of(model: SwitchModel) -> torch.optim.Optimizer:
    """Return AdamW. ``scale`` of a parameter group multiplies its rate."""
    groups: dict[tuple[float, int], list[torch.nn.Parameter]] = {}
    for name, weight in model.named_parameters():
        is_distance = name.endswith("distance")
        kind = (0.0 if is_distance or weight.ndim == 1 else WEIGHT_DECAY, DISTANCE_RATE if is_distance else 1)
        groups.setdefault(kind, []).append(weight)
    listed = [{"params": part, "weight_decay": decay, "scale": scale} for (decay, scale), part in groups.items()]
    return torch.optim.AdamW(listed, lr=RATE, betas=(0.9, 0.98), fused=True)


class Run(TrainingRun):
    """The training of the second example."""

    steps, score_every = STEPS, SCORE_EVERY

    def __init__(self, state: Path, log: Path, folder: Path, rank: int = 0) -> None:
        torch.manual_seed(SEED)
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(FIRST_MODEL / "tokenizer.json"))
        self.start = identity(self.tokenizer, PAD)
        model = SwitchModel(SwitchShape())
        model.initialise(torch.Generator().manual_seed(SEED))
        liken(model.embed, self.tokenizer)
        super().__init__(model, optimizer_of(model), state, log, rank)
        if rank == 0:
            write_configs(folder, SwitchShape(), identity(self.tokenizer, END), self.start)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return rate_at(step)

    def learn(self, batch: list[Pair]) -> tuple[float, float]:
        """Take one step. Return the loss on the answers and the load balancing loss."""
        prompts, is_real, read, targets = tensors_of(batch, self.start)
        logits, balance = self.model(prompts, is_real, read, places_of(batch))
        loss = functional.cross_entropy(logits, targets)
        self.descend(loss + BALANCE * balance, sum(len(pair.prompt) + len(pair.answer) for pair in batch))
        return loss.item(), balance.item()

    def score(self) -> None:
        """Score a part of the validation split, and export the model if it is no worse than before."""
        lines = (DATA / TASK / "validation.jsonl").read_text(encoding="utf-8").splitlines()[:SCORED]
        items = [json.loads(line) for line in lines]
        found = scores(TASK, answers(self.model, self.tokenizer, items), items)
        rouge2 = sum(found) / len(found)
        self.write(rouge2=rouge2)
        if rouge2 >= self.best:
            self.best = rouge2
            write_weights(self.folder, self.model)


if __name__ == "__main__":
    main("Train the second example.", Run, curriculum, "switch-train", "switch_train.log", MODEL)
