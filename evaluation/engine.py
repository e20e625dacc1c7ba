"""Interface of evaluation to an engine. The runtime implements it, for bundles and for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from moec.manifests.errors import ExecutionError
from moec.manifests.progress import Progress

Request = TypeVar("Request")
Result = TypeVar("Result")
Take = Callable[[int, Result], None]
"""Takes the index of a request and its result, once for each request and as soon as it is known."""


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
    """A model that continues and scores text."""

    def generate(self, requests: Sequence[GenerationRequest], take: Take[Generation]) -> None:
        """Continue each prompt greedily until the end token, a stop text or max_new_tokens."""
        ...

    def answer_log_probs(self, pairs: Sequence[tuple[str, str]], take: Take[AnswerScore]) -> None:
        """Score each answer given its prompt.

        pairs: (prompt, answer) each.
        With an empty prompt the whole answer is scored after the model's start token. A model without a start token
        does not score or count the first token.
        """
        ...


def check_count(count: int, expected: int) -> None:
    """Raise ExecutionError if an engine returned another number of results than requested."""
    if count != expected:
        raise ExecutionError(f"the engine gave {count} results for {expected} items")


def in_order(
    compute: Callable[[Sequence[Request], Take[Result]], None],
    requests: Sequence[Request],
    progress: Progress = no_progress,
) -> list[Result]:
    """Return the results of an engine in the order of the requests.

    compute: method of the engine.
    progress: called with (results taken, requests).
    Raises ExecutionError if a result is missing.
    """
    results: dict[int, Result] = {}

    def take(index: int, result: Result) -> None:
        results[index] = result
        progress(len(results), len(requests))

    compute(requests, take)
    check_count(len(results), len(requests))
    return [results[index] for index in range(len(requests))]
