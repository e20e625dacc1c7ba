"""The training loop of both examples: state on disk, log, and steps of several processes."""

import argparse
import json
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor, distributed, multiprocessing, nn

# Two processes of one thread train twice as fast as one process of two threads, because the products are too small to
# share. Each process takes one batch of a step. The gradients are averaged.
WORKERS = 2


class TrainingRun(ABC):
    """The state of a training run, in memory and on disk. A parameter group may have a ``scale`` of its rate."""

    tokenizer: Tokenizer
    steps: int
    score_every: int  # steps; the state is saved as often
    log_every = 25

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Path, log: Path, rank: int) -> None:
        self.model, self.optimizer, self.state, self.log, self.rank = model, optimizer, state, log, rank
        self.step, self.tokens, self.seconds, self.best = 0, 0, 0.0, 0.0
        state.parent.mkdir(parents=True, exist_ok=True)
        if state.exists():
            self.resume()
        elif rank == 0:
            log.write_text("", encoding="utf-8")

    @abstractmethod
    def learn(self, batch: Any) -> tuple[float, float]:
        """Take one step. Return the loss on the answers and the load balancing loss."""

    @abstractmethod
    def score(self) -> None:
        """Score a part of the validation splits, and export the model if it is no worse than before."""

    @abstractmethod
    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""

    def resume(self) -> None:
        """Load the saved state. Drop the log lines of later steps."""
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

    def descend(self, loss: Tensor, tokens: int) -> None:
        """Compute gradients and take a step of the optimizer. tokens: number of tokens in the batch of this process."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.average_gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.step) * group.get("scale", 1)
        self.optimizer.step()
        self.step += 1
        self.tokens += WORKERS * tokens

    def average_gradients(self) -> None:
        """Replace the gradients of all processes by their mean."""
        if not distributed.is_initialized():
            return
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        distributed.all_reduce(flat)
        flat /= distributed.get_world_size()
        for gradient, part in zip(gradients, torch.split_with_sizes(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def to_the_end(self, batches: Sequence[Any]) -> None:
        """Run all steps that are left. batches: those of all processes, in turns."""
        if len(batches) < self.steps * WORKERS:
            raise SystemExit(f"{len(batches)} batches are too few for {self.steps} steps of {WORKERS}")
        distributed.barrier()
        losses: list[float] = []
        before = time.monotonic()
        while self.step < self.steps:
            loss, balance = self.learn(batches[self.step * WORKERS + self.rank])
            losses.append(loss)
            self.seconds += time.monotonic() - before
            before = time.monotonic()
            if self.rank != 0:
                continue
            if self.step % self.log_every == 0:
                self.write(loss=sum(losses) / len(losses), balance=balance, rate=self.rate(self.step - 1))
                losses = []
            if self.step % self.score_every == 0 or self.step == self.steps:
                self.score()
                self.save()


class MakeRun(Protocol):
    """A constructor of the training run of one process."""

    def __call__(self, state: Path, log: Path, folder: Path, rank: int) -> TrainingRun:
        """Return the run. Its tokenizer is loaded."""


def train(
    rank: int, meeting: str, run: MakeRun, curriculum: Callable[[Tokenizer], Sequence[Any]], *files: Path
) -> None:
    """Train in one process, to the end.

    rank: number of the process.
    meeting: file through which the processes find each other.
    files: state, log and model folder of the run.
    """
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORKERS)
    state, log, folder = files
    mine = run(state, log, folder, rank)
    mine.to_the_end(curriculum(mine.tokenizer))
    distributed.destroy_process_group()


def main(
    description: str, run: MakeRun, curriculum: Callable[[Tokenizer], Sequence[Any]], name: str, log: str, model: Path
) -> None:
    """Read the command line and train in every process.

    curriculum: returns all batches in order.
    name: name of the state file, without its suffix.
    log, model: default names of the log file and of the model folder.
    """
    examples = Path(__file__).parents[1]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--state", type=Path, default=examples.parent / "build" / f"{name}.state")
    parser.add_argument("--log", type=Path, default=examples / log)
    parser.add_argument("--model", type=Path, default=model)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (str(Path(folder) / "meeting"), run, curriculum, options.state, options.log, options.model)
        multiprocessing.spawn(train, arguments, nprocs=WORKERS)  # type: ignore[attr-defined, no-untyped-call]
