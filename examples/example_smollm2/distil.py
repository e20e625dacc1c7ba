"""Training of experts and routers: the student predicts what the dense network predicts.

The loss is the KL divergence of the student's next-token probabilities from the dense network's, over all tokens.
Source: "Distilling the Knowledge in a Neural Network", section 2, at temperature 1.
The same command continues a run that was stopped.
"""

import json
import math
import os
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from example_smollm2.network import Network
from example_smollm2.perplexity import perplexity

ROWS = 8
"""Rows of a step."""
CHUNK_TOKENS = 256
"""Tokens whose logits are held at once."""
RATE, ROUTER_RATE, WARM_UP_STEPS = 3e-4, 1e-3, 20
SAVE_EVERY = 25
"""Steps between two states on disk."""
SCORED_ROWS = 48


class Distillation:
    """A training run, in memory and on disk.

    seconds: the processor time that it may take in all, over all runs, for each thread. The learning rate falls to 0
        with it.
    """

    def __init__(self, dense: Network, student: Network, state: Path, log: Path, seconds: float) -> None:
        self.dense, self.student, self.state, self.log, self.limit = dense, student, state, log, seconds
        self.step, self.seconds = 0, 0.0
        trained, routers = trained_parameters(student)
        groups = [{"params": trained, "peak": RATE}, {"params": routers, "peak": ROUTER_RATE}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
        if state.exists():
            self._resume()
        else:
            log.write_text("", encoding="utf-8")

    def run(self, rows: Tensor, validation: Tensor) -> None:
        """Train until the time is over. rows: [N, T] training text, used in order, again from the start at its end."""
        losses: list[float] = []
        while self.seconds < self.limit:
            began = _processor_seconds()
            at = self.step * ROWS % (len(rows) - ROWS + 1)
            losses.append(self.learn(rows[at : at + ROWS]))
            self.step += 1
            self.seconds += _processor_seconds() - began
            if self.step % SAVE_EVERY == 0 or self.seconds >= self.limit:
                scored = perplexity(self.student, validation[:SCORED_ROWS])
                self._write(kl=sum(losses) / len(losses), perplexity=scored)
                self.save()
                losses = []

    def learn(self, tokens: Tensor) -> float:
        """Take one step. tokens: [B, T]. Returns the mean KL in nats per token."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.inference_mode():
                wanted = self.dense(tokens).flatten(0, 1).clone()
            states = self.student(tokens).flatten(0, 1)
        loss, gradient = self._divergence(wanted, states.detach())
        states.backward(gradient)
        torch.nn.utils.clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], 1.0)
        share = self._share()
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * share
        self.optimizer.step()
        return loss

    def _divergence(self, wanted: Tensor, states: Tensor) -> tuple[float, Tensor]:
        """Return the mean KL and its gradient to the student's states.

        wanted, states: final states of both networks, [N, D].
        """
        head = self.dense.embedding.to(torch.bfloat16)
        total, gradient = 0.0, torch.empty_like(states)
        for part in torch.arange(len(states)).split(CHUNK_TOKENS):
            target = functional.linear(wanted[part].to(torch.bfloat16), head).float().log_softmax(-1)
            own = functional.linear(states[part].to(torch.bfloat16), head).float().log_softmax(-1)
            total += functional.kl_div(own, target, reduction="sum", log_target=True).item()
            # The gradient of KL to the logits is the difference of the probabilities.
            difference = (own.exp_() - target.exp_()).to(torch.bfloat16)
            gradient[part] = (difference @ head).to(gradient.dtype)
        return total / len(states), gradient / len(states)

    def _share(self) -> float:
        """Return the learning rate as a share of its peak: a linear start, then a cosine over the time."""
        start = min(1.0, (self.step + 1) / WARM_UP_STEPS)
        return start * 0.5 * (1 + math.cos(math.pi * min(1.0, self.seconds / self.limit)))

    def _resume(self) -> None:
        saved = torch.load(self.state)
        _, routers = trained_parameters(self.student)
        trained, _ = trained_parameters(self.student)
        for parameter, value in zip([*trained, *routers], saved["weights"], strict=True):
            parameter.data.copy_(value)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.seconds = saved["progress"]
        lines = self.log.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] <= self.step]
        self.log.write_text("".join(kept), encoding="utf-8")

    def save(self) -> None:
        """Write the state."""
        new = self.state.with_name(self.state.name + ".new")
        weights = [parameter.detach() for group in self.optimizer.param_groups for parameter in group["params"]]
        progress = (self.step, self.seconds)
        torch.save({"weights": weights, "optimizer": self.optimizer.state_dict(), "progress": progress}, new)
        os.replace(new, self.state)

    def _write(self, **values: float) -> None:
        tokens = self.step * ROWS
        line = {"step": self.step, "rows": tokens, "seconds": round(self.seconds)}
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | {name: round(value, 5) for name, value in values.items()}) + "\n")


def _processor_seconds() -> float:
    """Return the processor time of this process for each thread. A pause and other programs do not count."""
    return time.process_time() / torch.get_num_threads()


def trained_parameters(student: Network) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters that are trained: of experts with the norms before them, and of routers and gates."""
    trained, routers = [], []
    for layer in student.layers:
        parts = layer.feed_forward
        trained += [parts.gate, parts.up, parts.down, layer.norm]
        routers += [parts.router, parts.shared_gate]
    for parameter in [*trained, *routers]:
        parameter.requires_grad_(True)
    return trained, routers
