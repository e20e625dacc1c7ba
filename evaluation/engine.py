"""Interface of evaluation to an engine. The runtime implements it, for bundles and for checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moec.manifests.progress import Progress


def no_progress(done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One greedy continuation to produce.

    draft: a guess of the continuation. An engine may verify it in one pass instead of decoding token by token. It keeps
        the prefix that greedy decoding would produce; the text must not depend on the draft.
    stop: an engine may end when the text contains one of them. The caller cuts the text there in any case.
    """

    prompt: str
    draft: str | None
    max_new_tokens: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A continuation without its prompt and without special tokens.

    tokens: number of new tokens.
    is_cut: it ended at its most new tokens or at the end of the context, not by an end token or a stop text.
    """

    text: str
    tokens: int
    prompt_tokens: int
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """Teacher-forced score of an answer.

    nll: sum of -log p over the answer tokens, in nats.
    tokens: number of answer tokens.
    """

    nll: float
    tokens: int


class TextEngine(Protocol):
    """A model that continues and scores text. Results have the order of the requests."""

    def generate(self, requests: Sequence[GenerationRequest], progress: Progress) -> list[Generation]:
        """Continue each prompt greedily until the end token, a stop text or max_new_tokens."""
        ...

    def answer_log_probs(self, pairs: Sequence[tuple[str, str]], progress: Progress) -> list[AnswerScore]:
        """Score each answer given its prompt.

        pairs: (prompt, answer) each.
        With an empty prompt the whole answer is scored after the model's start token. A model without a start token
        does not score or count the first token.
        """
        ...
