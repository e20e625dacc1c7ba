"""Scores of given answers: the sum of log probabilities of their tokens, and whether greedy decoding gives them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moec.manifests.errors import ExecutionError

from ..text.log_probabilities import shifted_and_total
from .batch import force_answers
from .engine import Engine


@dataclass(slots=True)
class AnswerTotal:
    """The score of the tokens of an answer so far.

    log_prob: sum of log p over its tokens, in nats.
    is_greedy: whether each token is the likeliest one at its place. Of equal ones, that is the lowest id.
    tokens: number of tokens.
    """

    log_prob: float = 0.0
    is_greedy: bool = True
    tokens: int = 0

    def add(self, logits: np.ndarray, targets: Sequence[int]) -> None:
        """Add the next tokens.

        logits: float32 [n, V].
        targets: n token ids.
        Raises ExecutionError for logits that are no numbers.
        """
        shifted, total = _checked(logits)
        self.log_prob += float((shifted[np.arange(len(targets)), list(targets)] - total).sum())
        self.is_greedy = self.is_greedy and bool((shifted.argmax(axis=1) == targets).all())
        self.tokens += len(targets)


def next_token_scores(logits: np.ndarray, tokens: Sequence[int]) -> list[AnswerTotal]:
    """Return the score of each of several next tokens. logits: float32 [V]. Raises ExecutionError as `AnswerTotal`."""
    (shifted,), (total,) = _checked(logits[None])
    likeliest = int(shifted.argmax())
    return [AnswerTotal(float(shifted[token] - total), token == likeliest, 1) for token in tokens]


def score_answers(
    engine: Engine, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], decodes: bool = False
) -> Iterator[tuple[int, AnswerTotal]]:
    """Yield for each pair its index and the score of its answer. Logits are used as they are computed, and not kept.

    The parameters are those of `force_answers`. After an empty prompt the first token is not scored.
    """
    totals: dict[int, AnswerTotal] = {}

    def take(index: int, logits: np.ndarray) -> None:
        prompt, answer = pairs[index]
        total = totals[index]
        start = total.tokens + (not prompt)
        total.add(logits, answer[start : start + len(logits)])

    totals.update((index, AnswerTotal()) for index in range(len(pairs)))
    for group in force_answers(engine, pairs, take, decodes):
        for index in group:
            yield index, totals.pop(index)


def _checked(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not np.isfinite(logits.max(axis=1)).all():
        raise ExecutionError("the logits hold NaN or infinity", "check the bundle with `moec verify`")
    return shifted_and_total(logits)
