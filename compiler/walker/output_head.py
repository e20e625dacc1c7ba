"""From the residual stream after the last layer to logits, and how far the answers of two models differ.

Shapes: D hidden, V vocabulary, A tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..families import Lowering
from ..workspace.parallel import Workers, workers
from .texts import LOGITS_PER_CHUNK
from .torch_device import CPU

_HEADS_AT_ONCE = 4
"""Most threads that compute logits at the same time. Each holds about 5 times LOGITS_PER_CHUNK."""
_ROWS_PER_CHUNK = 4096  # of the vocabulary matrix, converted to float32 at a time


def tokens_at_once(vocabulary: int) -> int:
    """Return the number of tokens whose logits are held at once."""
    return max(1, LOGITS_PER_CHUNK // vocabulary)


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The product that turns normed residual streams into logits.

    matrix: [V, D], may have 16 bits. Its device is where logits are computed.
    bias: float32 [V], or None.
    softcap: bound c of logits x, which become c tanh(x / c); 0 for none.
    """

    matrix: Tensor
    bias: Tensor | None = None
    softcap: float = 0.0

    def __len__(self) -> int:
        return len(self.matrix)

    def with_matrix(self, matrix: Tensor) -> OutputHead:
        """Return the same head with another matrix, on the same device."""
        return replace(self, matrix=matrix.to(self.matrix.device))

    def logits(self, states: Tensor) -> Tensor:
        """[A, D] -> [A, V] float32, on the device of the head."""
        states = states.to(self.matrix.device)
        out = states.new_empty(len(states), len(self))
        for start in range(0, len(self), _ROWS_PER_CHUNK):
            piece = self.matrix[start : start + _ROWS_PER_CHUNK]
            out[:, start : start + len(piece)] = states @ piece.float().T
        out = out if self.bias is None else out.add_(self.bias)
        return out.div_(self.softcap).tanh_().mul_(self.softcap) if self.softcap else out

    def log_probs(self, states: Tensor) -> Tensor:
        """[A, D] -> log probabilities [A, V] float32. In addition to them, logits of a part of the tokens are held."""
        out = self.logits(states)
        for tokens in self.token_slices(len(out)):
            out[tokens] -= out[tokens].logsumexp(-1, keepdim=True)
        return out

    def back(self, gradients: Tensor, logits: Tensor) -> Tensor:
        """Return gradients at normed residual streams [A, D] of gradients at logits [A, V], on their device.

        logits: of these streams, [A, V].
        """
        if self.softcap:
            gradients = gradients * (1 - (logits / self.softcap) ** 2)
        out = gradients.new_zeros(len(gradients), self.matrix.shape[1])
        for start in range(0, len(self), _ROWS_PER_CHUNK):
            out += gradients[:, start : start + _ROWS_PER_CHUNK] @ self.matrix[start : start + _ROWS_PER_CHUNK].float()
        return out

    def token_slices(self, tokens: int) -> Iterator[slice]:
        """Yield the tokens whose logits are held at once, part after part."""
        count = tokens_at_once(len(self))
        return (slice(start, start + count) for start in range(0, tokens, count))


def head_workers(threads: int) -> AbstractContextManager[Workers]:
    """Start threads that compute logits of parts of the tokens: the same bits for any number of them."""
    return workers(min(threads, _HEADS_AT_ONCE))


def output_head(lowering: Lowering, device: torch.device = CPU) -> OutputHead:
    """Return the checkpoint's own head. Its bias has the scale that `LoadedLayer.normed` gives the states.

    device: where logits are computed.
    """
    model = lowering.model
    matrix = lowering.dense_weight(model.head_name).to(device)
    bias = lowering.dense_weight("lm_head_bias").float() * model.logits_scale if model.has_head_bias else None
    return OutputHead(matrix, None if bias is None else bias.to(device), model.logit_softcap)


def divergence(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL in nats [a], and whether the most likely token agrees [a], of log-probabilities [a, V]."""
    kl = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).clamp_min_(0)
    return kl, log_p.argmax(-1) == log_q.argmax(-1)
