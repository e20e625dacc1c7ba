"""Choose a token from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moec.manifests.errors import ExecutionError, OptionError

from ..kernels.elementary import exp
from ..options.field_types import check_field_types

LEAST_PENALTY, MOST_PENALTY = 0.01, 100.0
"""Bounds of the repetition penalty. They exceed all useful values, and within them no finite logit of a sound model
overflows.
"""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Options of sampling. Raises OptionError outside the ranges.

    temperature: 0 is greedy.
    top_k: number of likeliest tokens to keep; 0 keeps all.

    top_p: probability of the likeliest tokens to keep; 1 keeps all.
    min_p: least probability of a token, as a share of the likeliest one; 0 keeps all.

    repetition_penalty: positive logits of tokens in the text are divided by it, negative ones multiplied.
    seed: seed of the random generator.

    The penalty applies at any temperature.
    The order is that of transformers: penalty, temperature, top-k, top-p, min-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_field_types(self)
        if not 0 <= self.temperature <= 100:
            raise OptionError(f"temperature must be 0 to 100, found {self.temperature}")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise OptionError("top-k must not be negative and top-p must be more than 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise OptionError(f"min-p must be 0 to 1, found {self.min_p}")
        if not LEAST_PENALTY <= self.repetition_penalty <= MOST_PENALTY:
            raise OptionError(
                f"the repetition penalty must be {LEAST_PENALTY:g} to {MOST_PENALTY:g}, "
                f"found {self.repetition_penalty:g}",
                "try 1.1",
            )
        if self.seed < 0:
            raise OptionError(f"the seed must not be negative, found {self.seed}")
        if self.temperature == 0 and (self.top_k or self.top_p < 1 or self.min_p):
            raise OptionError("top-k, top-p and min-p have no effect at temperature 0", "set `--temperature`")


class Sampler:
    """Draws tokens. It owns its random generator: one seed gives one sequence."""

    def __init__(self, options: SamplingOptions) -> None:
        self._options = options
        self._generator = np.random.default_rng(options.seed)

    def __call__(self, logits: np.ndarray, tokens: Sequence[int] = ()) -> int:
        """Pick a token. For equal logits, greedy takes the lowest id.

        logits: float32 [V].
        tokens: tokens of the prompt and of the answer so far.
        Raises ExecutionError on NaN or infinity.
        """
        # Before the check, because it may overflow
        logits = penalised(logits, tokens, self._options.repetition_penalty)
        if not np.isfinite(logits.max()):
            raise ExecutionError("the logits hold NaN or infinity", "check the bundle with `moec verify`")
        if self._options.temperature == 0:
            return int(np.argmax(logits))
        order, weights = self.distribution(logits)
        return int(self._generator.choice(order, p=weights))

    def distribution(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that may be drawn, likeliest first, and their probabilities, which sum to 1."""
        options = self._options
        with np.errstate(over="ignore"):  # at a tiny temperature all but the largest become -inf
            scaled = (logits.astype(np.float64) - logits.max()) / options.temperature
        order = np.argsort(-scaled, kind="stable")
        if options.top_k:
            order = order[: options.top_k]
        with np.errstate(over="ignore"):
            weights = exp(scaled[order].astype(np.float32)).astype(np.float64)
        weights /= weights.sum()
        if options.top_p < 1:
            # Keep the smallest set that reaches top_p; the first token always stays.
            kept = int(np.searchsorted(np.cumsum(weights), options.top_p)) + 1
            order, weights = order[:kept], weights[:kept] / weights[:kept].sum()
        if options.min_p:
            kept = int((weights >= options.min_p * weights[0]).sum())
            order, weights = order[:kept], weights[:kept] / weights[:kept].sum()
        return order, weights


def penalised(logits: np.ndarray, tokens: Sequence[int], penalty: float) -> np.ndarray:
    """Return logits [V] in which the tokens of a text are less likely. Source: CTRL, section 4.1."""
    if penalty == 1.0 or not len(tokens):
        return logits
    seen, changed = np.unique(tokens), logits.copy()
    own = changed[seen]
    with np.errstate(over="ignore"):  # the sampler raises for infinite logits
        changed[seen] = np.where(own > 0, own / np.float32(penalty), own * np.float32(penalty))
    return np.asarray(changed)
