"""The answer to a generation over HTTP, in the form of an API, with a watch for clients that leave."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from starlette.types import Receive, Scope, Send

from ..engine.request import Ended, Event, Failed, GenerationRequest, TokenMade
from ..engine.scheduler import QueueFull, ShuttingDown
from .errors import RequestError, error_of_failure, json_bytes
from .json_parts import json_parts, pieces
from .service import Inbox, Service

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"


class AnswerForm(Protocol):
    """The form of one API. It collects events and turns them into server-sent events as they come."""

    def begin(self) -> Iterable[bytes]:
        """Return the events before the first token."""

    def add(self, index: int, event: Event) -> Iterable[bytes]:
        """Take an event of answer `index`, and return the events that it makes."""

    def finish(self) -> Iterable[bytes]:
        """Return the events after the last answer."""

    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""

    def failed(self, error: RequestError) -> Iterable[bytes]:
        """Return the last events of a stream that failed."""

    def error_body(self, error: RequestError) -> dict[str, Any]:
        """Return the body of a response without an answer."""


MakeRequests: TypeAlias = Callable[[Sequence[Callable[[Event], None]]], list[GenerationRequest]]
"""Makes the requests of an answer from one receiver of events for each."""


def sent_event(value: Any, name: str | None = None) -> bytes:
    """Return one server-sent event. name: its type, or None."""
    line = b"" if name is None else b"event: " + name.encode() + b"\n"
    return line + b"data: " + json_bytes(value) + b"\n\n"


class Answer:
    """An ASGI response that runs requests and tells what comes back. Requests end when the client leaves.

    count: number of answers.
    make: makes their requests.
    log_prob_bytes: memory of their log probabilities.
    """

    def __init__(
        self,
        service: Service,
        count: int,
        make: MakeRequests,
        form: AnswerForm,
        streams: bool,
        log_prob_bytes: int = 0,
    ) -> None:
        self._service, self._count, self._make, self._form, self._streams = service, count, make, form, streams
        self._log_prob_bytes = log_prob_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        memory = self._service.log_probs
        try:
            memory.hold(self._log_prob_bytes)
        except RequestError as refused:
            await send_error(send, refused, self._form.error_body(refused))
            return
        try:
            await self._answer(receive, send)
        finally:
            memory.release(self._log_prob_bytes)

    async def _answer(self, receive: Receive, send: Send) -> None:
        inbox, scheduler = self._service.post.inbox(self._count), self._service.scheduler
        requests = self._make(inbox.receivers)
        try:
            scheduler.submit(requests)
        except QueueFull as full:
            message = f"{full.waiting} requests wait, and the queue holds {scheduler.options.queue}"
            refused = RequestError(429, message, None, "queue_full", {"Retry-After": "2"})
            await send_error(send, refused, self._form.error_body(refused))
            return
        except ShuttingDown:
            refused = error_of_failure(Failed("shutting_down", "the server takes no more requests"))
            await send_error(send, refused, self._form.error_body(refused))
            return
        leaving = asyncio.create_task(until_gone(receive))
        work = asyncio.create_task(self._tell(inbox, requests, send))
        options = self._service.options
        longest = max(request.deadline_s or options.deadline_s for request in requests) + 2 * options.grace_s
        try:
            await asyncio.wait({leaving, work}, timeout=longest, return_when=asyncio.FIRST_COMPLETED)
        finally:
            scheduler.cancel(requests)
            leaving.cancel()
            if not work.done():
                work.cancel()
            await asyncio.gather(leaving, work, return_exceptions=True)
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _tell(self, inbox: Inbox, requests: Sequence[GenerationRequest], send: Send) -> None:
        open_answers, has_begun, has_token, clock = len(requests), False, False, asyncio.get_running_loop().time
        ping_s = self._service.options.ping_s
        sent_s = clock()
        ends_s = sent_s + max(request.deadline_s or 0.0 for request in requests) + self._service.options.grace_s
        while open_answers:
            events = await inbox.take(min(ping_s, max(ends_s - clock(), 0.0)))
            if not events and clock() >= ends_s:  # the engine is stuck inside a pass
                events = [(0, Failed("deadline_exceeded", "the request took longer than its deadline"))]
            failed = next((event for _, event in events if isinstance(event, Failed)), None)
            if failed is not None:
                await self._tell_failure(error_of_failure(failed), has_begun, send)
                return
            has_token = has_token or any(isinstance(event, TokenMade) for _, event in events)
            open_answers -= sum(isinstance(event, Ended) for _, event in events)
            pieces = list(self._pieces(events, has_begun, is_last=not open_answers))
            if self._streams:
                if not has_begun:
                    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                data = b"".join(pieces)
                if not data and (not events or not has_begun or clock() - sent_s >= ping_s):
                    data = self._comment(requests, has_token)
                has_begun = True
                if data or not open_answers:
                    await send({"type": "http.response.body", "body": data, "more_body": bool(open_answers)})
                    sent_s = clock()
        if not self._streams:
            await send_json(send, self._form.whole())

    def _pieces(self, events: Sequence[tuple[int, Event]], has_begun: bool, is_last: bool) -> Iterator[bytes]:
        if not has_begun:
            yield from self._form.begin()
        for index, event in events:
            yield from self._form.add(index, event)
        if is_last:
            yield from self._form.finish()

    def _comment(self, requests: Sequence[GenerationRequest], has_token: bool) -> bytes:
        """Return a comment that keeps a connection open: the place in the queue, or what is computed."""
        place = self._service.scheduler.place_in_queue(requests[0])
        state = f"queue {place}" if place is not None else "answer" if has_token else "prefill"
        return f": {state}\n\n".encode()

    async def _tell_failure(self, error: RequestError, has_begun: bool, send: Send) -> None:
        if not has_begun:
            await send_error(send, error, self._form.error_body(error))
            return
        data = b"".join(self._form.failed(error))
        await send({"type": "http.response.body", "body": data, "more_body": False})


async def until_gone(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, value: Any, status: int = 200, headers: Iterable[tuple[str, str]] = ()) -> None:
    """Send a value as the whole response. An EncodedList may be in it."""
    parts = [value] if isinstance(value, bytes) else json_parts(value)
    plain = [("content-type", "application/json"), ("content-length", str(sum(map(len, parts)))), *headers]
    coded = [(name.lower().encode(), text.encode()) for name, text in plain]
    await send({"type": "http.response.start", "status": status, "headers": coded})
    for piece in pieces(parts):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_error(send: Send, error: RequestError, body: dict[str, Any] | None = None) -> None:
    """Send an error as the whole response. body: its form; None for that of OpenAI."""
    await send_json(send, body or error.to_plain(), error.status, error.headers.items())


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
        if isinstance(event, TokenMade):
            self.count += 1
            self.pieces.append(event.text)
        elif isinstance(event, Ended):
            self.ended = event

    @property
    def text(self) -> str:
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
        return ()

    def finish(self) -> Iterable[bytes]:
        """Return the counts, if they were asked for, and the end of the stream."""
        if self._includes_usage:
            yield self.chunk([], usage=self.usage())
        yield DONE

    def failed(self, error: RequestError) -> Iterable[bytes]:
        return (sent_event(error.to_plain()), DONE)

    def error_body(self, error: RequestError) -> dict[str, Any]:
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
        ended = self.answers[index].ended
        return {} if ended is None else ended.timings.to_plain()

    def reason(self, index: int) -> str | None:
        """Return why an answer ended; None if it goes on."""
        ended = self.answers[index].ended
        return None if ended is None else ended.reason

    def whole_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._head,
            "object": self.kind,
            "choices": choices,
            "usage": self.usage(),
            "timings": self.timings(),
        }
