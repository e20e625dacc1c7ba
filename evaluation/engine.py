"""What evaluation asks of an engine. The compiler's reference model and the runtime both fit behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moec.manifests.progress import Progress

"""Called with (items done, items in all); done never falls."""


def no_progress(done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One greedy continuation to produce.

    draft: a guess of the continuation. An engine may verify it in one pass instead of decoding token by token and keep
    the prefix that greedy decoding would have produced; the text must not depend on the draft.
    stop: an engine may end as soon as the text contains one of these; whoever asked cuts there in any case.
    """

    prompt: str
    draft: str | None
    max_new_tokens: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A continuation without its prompt and without special tokens; `tokens` counts the new tokens."""

    text: str
    tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """Teacher-forced score: `nll` is the sum over `tokens` answer tokens of -log p, in nats."""

    nll: float
    tokens: int


class TextEngine(Protocol):
    """A model that continues and scores text. Results come in the order of the requests."""

    def generate(self, requests: Sequence[GenerationRequest], progress: Progress) -> list[Generation]:
        """Continue each prompt greedily until the end token, a stop text or max_new_tokens."""
        ...

    def answer_log_probs(self, pairs: Sequence[tuple[str, str]], progress: Progress) -> list[AnswerScore]:
        """Score each answer given its prompt: pairs of (prompt, answer).

        With an empty prompt the whole answer is scored after the model's start token; a model that has none leaves
        the first token unscored and does not count it.
        """
        ...
