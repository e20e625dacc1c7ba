"""Interface of lm-evaluation-harness's model to an engine: tokens in, scores and texts out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """Continuations of one context, as token ids. A context has at least one token."""

    context: Sequence[int]
    continuations: Sequence[Sequence[int]]


class ContinuationScore(Protocol):
    """The score of one continuation."""

    @property
    def log_prob(self) -> float:
        """Sum of log p over its tokens, in nats."""
        ...

    @property
    def is_greedy(self) -> bool:
        """True if greedy decoding gives these tokens."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """One text to continue.

    tokens: the prompt.
    stop: texts that end the answer. They are not part of it.
    sampling: settings of the sampler that are not greedy decoding's, by name, such as `temperature`.
    """

    tokens: Sequence[int]
    max_new_tokens: int
    stop: tuple[str, ...]
    sampling: Mapping[str, float] = field(default_factory=dict)


class HarnessEngine(Protocol):
    """A model that scores and continues tokens, many at once."""

    @property
    def context(self) -> int:
        """Most positions of a sequence."""
        ...

    @property
    def has_encoder(self) -> bool:
        """True if an encoder reads the prompt."""
        ...

    @property
    def start_token(self) -> int | None:
        """The token that begins a text; None if the model has none."""
        ...

    @property
    def end_token(self) -> int:
        """The first token that ends a text."""
        ...

    def encode(self, text: str, adds_special_tokens: bool) -> list[int]:
        """Return the tokens of a text. Raises ContextOverflow for one that is too long to encode."""
        ...

    def scores(self, groups: Iterable[ContextGroup], /) -> Iterator[Sequence[ContinuationScore]]:
        """Yield the scores of each group, in their order. Groups are read as they are needed."""
        ...

    def answers(self, requests: Iterable[AnswerRequest], /) -> Iterator[tuple[int, str]]:
        """Yield index and text of each answer, as they end. Requests are read as they are needed."""
        ...
