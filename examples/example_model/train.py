"""Train the example model: ``python -m example_model.train``. The same command again goes on where it was stopped.

Every 125 steps the state goes to ``--state`` and the model is scored on a part of the validation splits, and
what is better than before goes to ``--model``. The log is one JSON object a line.
"""

import argparse
import json
import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import distributed, multiprocessing
from torch.nn import functional

from example_model.checkpoint import write_configs, write_weights
from example_model.decode import END, PAD, answers, identity, scores
from example_model.items import SEED, TrainingText, drills, training_texts
from example_model.make_data import DATA
from example_model.make_tokenizer import MODEL
from example_model.model import ExampleModel, Shape

COUNTS = {"gsm8k": 94_000, "samsum": 50_000, "drill": 17_000}
BATCH_TOKENS = 1_500
CHUNK_ITEMS = 2_400
# Two processes of one thread train twice as fast as one of two threads: the products are too small to share.
# Each takes one batch of a step; the gradients are averaged.
WORKERS = 2
STEPS, WARM_UP, DECAY = 750, 100, 250
RATE, WEIGHT_DECAY, BALANCE = 1e-3, 0.1, 0.01
SAVE_EVERY, SCORE_EVERY, LOG_EVERY = 125, 125, 25
SCORED = {"gsm8k": 200, "samsum": 100}


@dataclass(frozen=True)
class Sequence:
    """Tokens, and the places whose successor the model learns to tell."""

    tokens: list[int]
    wanted: list[int]


def sums_only(answer: list[int], equals: int, stop: int) -> list[int]:
    """In a drill the numbers come from nowhere: only what follows from them is wanted, from ``=`` to the full stop."""
    wanted, inside = [], False
    for place, token in enumerate(answer[:-1]):
        inside = token == equals or (inside and token != stop)
        if inside:
            wanted.append(place)
    return wanted


def tokenise(tokenizer: Tokenizer, texts: list[TrainingText]) -> list[Sequence]:
    """Turn texts into sequences; the end token is part of the answer."""
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
    """All batches in their order: mixed tasks, more drills at first, sequences of like length together."""
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
    """Tokens [B, T] padded on the right, wanted places [N] in the flat batch, and their next tokens [N]."""
    length = max(len(sequence.tokens) for sequence in batch)
    tokens = torch.zeros(len(batch), length, dtype=torch.long)
    places, targets = [], []
    for row, sequence in enumerate(batch):
        tokens[row, : len(sequence.tokens)] = torch.tensor(sequence.tokens)
        places += [row * length + place for place in sequence.wanted]
        targets += [sequence.tokens[place + 1] for place in sequence.wanted]
    return tokens, torch.tensor(places), torch.tensor(targets)


def rate_at(step: int) -> float:
    """Warm up, stay, and go down to nothing."""
    return RATE * min(1.0, (step + 1) / WARM_UP, (STEPS - step) / DECAY)


@torch.no_grad()
def liken(model: ExampleModel, tokenizer: Tokenizer) -> None:
    """Start a word with a space before it close to the same word without: names stand in both forms."""
    vocabulary = tokenizer.get_vocab()
    space = model.embed[identity(tokenizer, "Ġ")].clone()
    for token, place in vocabulary.items():
        bare = vocabulary.get(token[1:]) if token[0] == "Ġ" else None
        if bare is not None:
            model.embed[place] = 0.8 * model.embed[bare] + 0.6 * space


class Run:
    """The state of a training run, in memory and on disk."""

    def __init__(self, state: Path, log: Path, model: Path, rank: int = 0) -> None:
        torch.manual_seed(SEED)
        self.state, self.log, self.folder, self.rank = state, log, model, rank
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.model = ExampleModel(Shape())
        self.model.initialise(torch.Generator().manual_seed(SEED))
        liken(self.model, self.tokenizer)
        matrices = [weight for weight in self.model.parameters() if weight.ndim > 1]
        vectors = [weight for weight in self.model.parameters() if weight.ndim == 1]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), fused=True)
        self.step, self.tokens, self.seconds, self.best = 0, 0, 0.0, 0.0
        state.parent.mkdir(parents=True, exist_ok=True)
        if state.exists():
            self.resume()
        elif rank == 0:
            log.write_text("", encoding="utf-8")
        if rank == 0:
            write_configs(model, Shape(), identity(self.tokenizer, END), identity(self.tokenizer, PAD))

    def resume(self) -> None:
        """Take up the saved state; log lines later than it are dropped."""
        saved = torch.load(self.state)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.tokens, self.seconds, self.best = saved["progress"]
        if self.rank != 0:
            return
        lines = self.log.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] <= self.step]
        self.log.write_text("".join(kept), encoding="utf-8")

    def save(self) -> None:
        """Write the state."""
        new = self.state.with_name(self.state.name + ".new")
        progress = (self.step, self.tokens, self.seconds, self.best)
        torch.save(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "progress": progress}, new
        )
        os.replace(new, self.state)

    def write(self, **values: float) -> None:
        """Add a line to the log."""
        line = {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds)}
        rounded = {name: round(value, 5) for name, value in values.items()}
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, **rounded}) + "\n")

    def learn(self, batch: list[Sequence]) -> tuple[float, float]:
        """One step; the loss on the wanted tokens and the load balancing loss."""
        tokens, places, targets = tensors_of(batch)
        logits, balance = self.model(tokens, places)
        loss = functional.cross_entropy(logits, targets)
        self.optimizer.zero_grad(set_to_none=True)
        (loss + BALANCE * balance).backward()
        self.average_gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.step)
        self.optimizer.step()
        self.step += 1
        self.tokens += WORKERS * sum(len(sequence.tokens) for sequence in batch)
        return loss.item(), balance.item()

    def average_gradients(self) -> None:
        """Make the gradients of all processes their mean."""
        if not distributed.is_initialized():
            return
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        distributed.all_reduce(flat)
        flat /= distributed.get_world_size()
        for gradient, part in zip(gradients, torch.split_with_sizes(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def score(self) -> None:
        """Score a part of the validation splits, and export what is better than before."""
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


def train(rank: int, meeting: str, state: Path, log: Path, model: Path) -> None:
    """One process of the run, to its end. meeting: a file through which the processes find each other."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORKERS)
    run = Run(state, log, model, rank)
    batches = curriculum(run.tokenizer)
    if len(batches) < STEPS * WORKERS:
        raise SystemExit(f"{len(batches)} batches are too few for {STEPS} steps of {WORKERS}")
    distributed.barrier()
    losses: list[float] = []
    before = time.monotonic()
    while run.step < STEPS:
        loss, balance = run.learn(batches[run.step * WORKERS + rank])
        losses.append(loss)
        run.seconds += time.monotonic() - before
        before = time.monotonic()
        if rank != 0:
            continue
        if run.step % LOG_EVERY == 0:
            run.write(loss=sum(losses) / len(losses), balance=balance, rate=rate_at(run.step - 1))
            losses = []
        if run.step % SCORE_EVERY == 0 or run.step == STEPS:
            run.score()
        if run.step % SAVE_EVERY == 0 or run.step == STEPS:
            run.save()
    distributed.destroy_process_group()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the example model.")
    examples = Path(__file__).parents[1]
    parser.add_argument("--state", type=Path, default=examples.parent / "build" / "example-train.state")
    parser.add_argument("--log", type=Path, default=examples / "train.log")
    parser.add_argument("--model", type=Path, default=MODEL)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (str(Path(folder) / "meeting"), options.state, options.log, options.model)
        multiprocessing.spawn(train, arguments, nprocs=WORKERS)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
