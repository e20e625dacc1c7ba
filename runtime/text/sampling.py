"""Choose a token from logits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moec.manifests.errors import ExecutionError, OptionError

from ..kernels.elementary import exp, natural_log
from ..options.setting import check_field_types

LEAST_PENALTY, MOST_PENALTY = 0.01, 100.0
"""Bounds of the repetition penalty. They exceed all useful values, and within them no finite logit of a sound model
overflows.
"""
MOST_BIAS = 100.0
"""Bound of a bias, and of the presence and frequency penalties. A bias of -100 excludes a token in effect."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Options of sampling. Raises OptionError outside the ranges.

    temperature: 0 is greedy.
    top_k: number of likeliest tokens to keep; 0 keeps all.

    top_p: probability of the likeliest tokens to keep; 1 keeps all.
    min_p: least probability of a token, as a share of the likeliest one; 0 keeps all.

    repetition_penalty: positive logits of tokens in the text are divided by it, negative ones multiplied.
    seed: seed of the random generator.

    presence_penalty: subtracted from the logit of each token that the answer has.
    frequency_penalty: subtracted from the logit of a token for each time that the answer has it.
    logit_bias: pairs of a token id inside the vocabulary and what is added to its logit.

    Penalties and biases apply at any temperature.
    The order is: repetition penalty, the other penalties, biases, temperature, top-k, top-p, min-p.
    That of transformers has no other penalties.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

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
        biases = (self.presence_penalty, self.frequency_penalty, *(bias for _, bias in self.logit_bias))
        if not all(-MOST_BIAS <= bias <= MOST_BIAS for bias in biases):
            raise OptionError(f"penalties and biases must be {-MOST_BIAS:g} to {MOST_BIAS:g}", "try 0.5")
        if self.temperature == 0 and (self.top_k or self.top_p < 1 or self.min_p):
            raise OptionError("top-k, top-p and min-p have no effect at temperature 0", "set `--temperature`")


class Sampler:
    """Draws tokens. It owns its random generator: one seed gives one sequence."""

    def __init__(self, options: SamplingOptions) -> None:
        self._options = options
        self._generator = np.random.default_rng(options.seed)
        self._has_own_penalties = bool(options.presence_penalty or options.frequency_penalty)

    def __call__(self, logits: np.ndarray, tokens: Sequence[int] = (), answer_start: int = 0) -> int:
        """Pick a token. For equal logits, greedy takes the lowest id.

        logits: float32 [V].
        tokens: tokens of the prompt and of the answer so far.
        answer_start: number of tokens of the prompt.
        Raises ExecutionError on NaN or infinity.
        """
        # Before the check, because it may overflow
        logits = penalised(logits, tokens, self._options.repetition_penalty)
        logits = biased(logits, tokens[answer_start:] if self._has_own_penalties else (), self._options)
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
            count = int(np.searchsorted(np.cumsum(weights), options.top_p)) + 1
            order, weights = order[:count], weights[:count] / weights[:count].sum()
        if options.min_p:
            count = int((weights >= options.min_p * weights[0]).sum())
            order, weights = order[:count], weights[:count] / weights[:count].sum()
        return order, weights


def penalised(logits: np.ndarray, tokens: Sequence[int], penalty: float) -> np.ndarray:
    """Return logits [V] in which the tokens of a text are less likely. Source: CTRL, section 4.1."""
    if penalty == 1.0 or not len(tokens):
        return logits
    seen, changed = np.unique(tokens), logits.copy()
    logits_of_text = changed[seen]
    with np.errstate(over="ignore"):  # the sampler raises for infinite logits
        changed[seen] = np.where(
            logits_of_text > 0, logits_of_text / np.float32(penalty), logits_of_text * np.float32(penalty)
        )
    return np.asarray(changed)


def biased(logits: np.ndarray, answer: Sequence[int], options: SamplingOptions) -> np.ndarray:
    """Return logits [V] after presence penalty, frequency penalty and biases.

    answer: tokens of the answer so far. The penalties do not count those of the prompt.
    """
    if not options.logit_bias and not len(answer):
        return logits
    changed = logits.copy()
    if len(answer):
        seen, counts = np.unique(answer, return_counts=True)
        changed[seen] -= np.float32(options.presence_penalty) + np.float32(options.frequency_penalty) * counts.astype(
            np.float32
        )
    for token, bias in options.logit_bias:
        changed[token] += np.float32(bias)
    return np.asarray(changed)


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
