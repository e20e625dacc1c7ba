"""Answers in the form of an API: chunks of a stream, identifiers, usage."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ...engine.request import Ended, Event, TokenMade
from ..answer import sent_event
from ..errors import RequestError

DONE = b"data: [DONE]\n\n"


def new_id(prefix: str) -> str:
    """Return an identifier that no other answer has."""
    return f"{prefix}-{secrets.token_hex(12)}"


@dataclass(slots=True)
class Collected:
    """The events of one answer so far, collected.

    pieces: its text.
    count: its tokens.
    """

    pieces: list[str] = field(default_factory=list)
    count: int = 0
    ended: Ended | None = None

    def add(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, TokenMade):
            self.count += 1
            self.pieces.append(event.text)
        elif isinstance(event, Ended):
            self.ended = event

    @property
    def text(self) -> str:
        """Text of the answer so far."""
        return "".join(self.pieces)


class OpenAIForm:
    """The parts of an answer that completions and chat completions share.

    kind, chunk_kind: `object` of a whole answer, and of a piece.
    prefix: beginning of the identifier.
    model: name of the model.
    count: number of answers.
    prompt_tokens: tokens of the prompts, each counted once.
    includes_usage: whether a last piece has the counts.
    """

    kind = chunk_kind = prefix = ""

    def __init__(self, model: str, count: int, prompt_tokens: int, includes_usage: bool) -> None:
        self.answers = [Collected() for _ in range(count)]
        self._head = {"id": new_id(self.prefix), "created": int(time.time()), "model": model}
        self._prompt_tokens, self._includes_usage = prompt_tokens, includes_usage

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """Return one piece as a server-sent event."""
        usage = {"usage": None} if self._includes_usage else {}
        return sent_event({**self._head, "object": self.chunk_kind, "choices": choices, **usage, **more})

    def begin(self) -> Iterable[bytes]:
        """Return the events before the first token."""
        return ()

    def finish(self) -> Iterable[bytes]:
        """Return the counts, if they were asked for, and the end of the stream."""
        if self._includes_usage:
            yield self.chunk([], usage=self.usage())
        yield DONE

    def failed(self, error: RequestError) -> Iterable[bytes]:
        """Return the error and the end of the stream."""
        return (sent_event(error.to_plain()), DONE)

    def error_body(self, error: RequestError) -> dict[str, Any]:
        """Return the body of a response without an answer."""
        return error.to_plain()

    def usage(self) -> dict[str, Any]:
        """Return the counts of tokens."""
        made = sum(answer.count for answer in self.answers)
        first = self.answers[0].ended
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self._prompt_tokens + made,
            "prompt_tokens_details": {"cached_tokens": 0 if first is None else first.timings.cached_tokens},
        }

    def timings(self, index: int = 0) -> dict[str, Any]:
        """Return the times and cache counts of one answer."""
        ended = self.answers[index].ended
        return {} if ended is None else ended.timings.to_plain()

    def reason(self, index: int) -> str | None:
        """Return why an answer ended; None if it goes on."""
        ended = self.answers[index].ended
        return None if ended is None else ended.reason

    def whole_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the whole answer around its choices."""
        return {
            **self._head,
            "object": self.kind,
            "choices": choices,
            "usage": self.usage(),
            "timings": self.timings(),
        }
