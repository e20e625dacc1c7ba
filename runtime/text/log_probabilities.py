"""Log probabilities of tokens, from the logits of the model before any penalty or temperature."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from ..kernels.elementary import exp, natural_log


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """A token with its log probability, nats.

    ids, values: the likeliest tokens at its place, likeliest first, and their log probabilities. A prompt has many of
    them, and arrays take a fifth of the memory of pairs.
    """

    token_id: int
    log_prob: float
    ids: array[int] = field(default_factory=lambda: array("i"))
    values: array[float] = field(default_factory=lambda: array("d"))

    @property
    def likeliest(self) -> list[tuple[int, float]]:
        """The likeliest tokens as pairs of id and log probability."""
        return list(zip(self.ids, self.values, strict=True))


def shifted_and_total(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return logits less their largest, float64 [..., V], and the logarithm of the sum of their exponentials, [...].

    Their difference is the log probability, in nats.
    logits: float32 [..., V].
    """
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):
        return shifted, natural_log(exp(shifted.astype(np.float32)).astype(np.float64).sum(axis=-1))


def token_log_prob(logits: np.ndarray, token: int, count: int) -> TokenLogProb:
    """Return the log probability of a token, and the `count` likeliest tokens. Of equal ones, the lowest id is first.

    logits: float32 [V].
    """
    shifted, total = shifted_and_total(logits)
    count = min(count, len(shifted))
    if count <= 1:
        chosen = np.asarray([np.argmax(shifted)][:count], np.int64)
    else:
        least = np.partition(shifted, len(shifted) - count)[len(shifted) - count]
        candidates = np.flatnonzero(shifted >= least)
        chosen = np.asarray(candidates[np.argsort(-shifted[candidates], kind="stable")][:count])
    ids, values = array("i", chosen.astype(np.int32).tobytes()), array("d", (shifted[chosen] - total).tobytes())
    return TokenLogProb(token, float(shifted[token] - total), ids, values)
