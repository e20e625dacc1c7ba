"""Parts that the handlers of all APIs use: the scheduler, the tokenizer, the chat template, and facts of the bundle."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

from moec.manifests.errors import InputError, MoecError, OptionError
from moec.runtime.engine.engine import Engine
from moec.runtime.text.generation_defaults import PLAIN, sampling_fields
from moec.runtime.text.sampling import SamplingOptions
from moec.runtime.text.template_process import ChatRenderer, template_files
from moec.runtime.text.tokenizer import BundleTokenizer, TokenBytes, named_texts

from ..engine.request import Event, Failed
from ..engine.scheduler import Scheduler
from ..grammar.masks import Grammars, GrammarsClosed, GrammarsFull
from ..tools.chat_form import chat_form_of
from .errors import RequestError, error_of, error_of_failure
from .log_probs import LogProbMemory

R = TypeVar("R")
_PIECE_MARKS = ("\u2581", "\u0120")
"""First characters of vocabulary entries that stand for a space."""


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Options of the HTTP side.

    name: name of the model.
    sampling: sampling of requests that do not say it.
    verdict: for which tasks the verdict on the bundle holds; empty without one.
    deadline_s: most seconds for a request, its time in the queue included.
    ping_s: seconds without an event after which a stream gets a comment.
    body_s: most seconds in which a body must arrive.
    grace_s: seconds after the deadline in which a client can still read the end of its answer.
    """

    name: str
    sampling: SamplingOptions = PLAIN
    verdict: str = ""
    deadline_s: float = 600.0
    ping_s: float = 15.0
    body_s: float = 30.0
    grace_s: float = 5.0


class Service:
    """One served bundle. One thread encodes texts, so that their memory is used once.

    Two more threads wait for the processes of the template and of grammars, so that other requests do not.

    body_bytes: bytes of the bodies that arrive now.
    log_probs: memory of the log probabilities of all open answers.
    post: brings events of the scheduler to the tasks that answer.
    """

    def __init__(self, scheduler: Scheduler, options: ServiceOptions) -> None:
        self.scheduler, self.options, self.started_s = scheduler, options, int(time.time())
        self.engine: Engine = scheduler.engine
        self.post = EventPost()
        scheduler.after_events = self.post.send
        self.mode = self.engine.mode.removeprefix("mode: ")
        ends = self.engine.bundle.manifest.model.eos_token_ids
        self.grammars = Grammars(self.engine.tokenizer, self.vocabulary, ends)
        self._texts, self._rendering = ThreadPoolExecutor(1, "texts"), ThreadPoolExecutor(1, "template")
        self._compiling, self._waiting_grammars = ThreadPoolExecutor(1, "grammars"), 0
        self._renderer: ChatRenderer | None = None
        self._template = template_files(self.engine.bundle, self.engine.options.verify)
        files = [data for data in (self._template.config, self._template.template) if data]
        self.chat_form = chat_form_of(files, self.engine.tokenizer)
        self._tokens = TokenTexts(self.engine.tokenizer)
        self.log_probs = LogProbMemory(self.engine.memory.context)
        self.body_bytes = 0

    def close(self) -> None:
        """End the threads, and the processes of the template and of grammars."""
        self.grammars.stop()
        for threads in (self._texts, self._rendering, self._compiling):
            threads.shutdown(wait=True, cancel_futures=True)
        self.grammars.close()
        if self._renderer is not None:
            self._renderer.close()

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.engine.model.spec.vocab_size)

    @property
    def tool_form(self) -> str | None:
        """The form in which the model calls tools; None if it calls none, or in a form that is not known."""
        form = self.chat_form
        if not form.takes_tools:
            return None
        return "Harmony" if form.is_harmony else None if form.syntax is None else form.syntax.name

    async def in_thread(self, work: Callable[[], R]) -> R:
        """Return the result of work with texts, done in their thread."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, work)

    async def with_grammars(self, work: Callable[[], R]) -> R:
        """Return the result of work with grammars, done in their thread.

        Raises RequestError if too many requests wait for it, if there is no memory, and at the end of the server.
        """
        if self._waiting_grammars > self.scheduler.options.queue:
            message = f"{self._waiting_grammars} schemas wait to be compiled"
            raise RequestError(429, message, None, "queue_full", {"Retry-After": "2"})
        self._waiting_grammars += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._compiling, work)
        except GrammarsFull as error:
            message = "grammars of other answers fill the memory for them"
            raise RequestError(429, message, None, "grammars_full", {"Retry-After": "2"}) from error
        except GrammarsClosed as error:
            raise error_of_failure(Failed("shutting_down", "the server takes no more requests")) from error
        finally:
            self._waiting_grammars -= 1

    async def encode(self, text: str, param: str, adds_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises RequestError."""
        try:
            return await self.in_thread(lambda: self.engine.encode(text, adds_special_tokens))
        except MoecError as error:
            raise error_of(error, param) from error

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a chat by the bundle's template. Raises RequestError.

        variables: more variables of the template.
        """
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._rendering, lambda: self._render(messages, tools, variables or {}))
        except OptionError as error:
            raise RequestError(
                400,
                f"the bundle `{self.options.name}` has no chat template; ask `/v1/completions`",
                "messages",
                "no_chat_template",
            ) from error
        except MoecError as error:
            raise error_of(error, "messages") from error

    def check_prompt(self, tokens: Sequence[int], param: str, has_answer: bool = True) -> None:
        """Refuse a prompt that is empty, outside the vocabulary, or too long. Raises RequestError."""
        context = self.engine.memory.context
        if len(tokens) > context:
            message = f"the context of {context} tokens must have room for an answer"
            message = f"the prompt has {len(tokens)} tokens, and {message}"
            raise RequestError(400, message, param, "context_length_exceeded")
        try:
            self.engine.check_tokens(tokens, room=1 if has_answer else 0)
        except MoecError as error:
            raise error_of(error, param) from error

    def token_text(self, token: int) -> tuple[str, bytes]:
        """Return the text of one token, with its leading space, and its bytes. See TokenTexts."""
        return self._tokens.of(token)

    def tokenizer_settings(self) -> dict[str, str]:
        """Return the chat template, and the names of the first and the padding token, where the bundle has them."""
        settings = named_texts(self._template.config, ("bos_token", "pad_token", "chat_template"))
        if self._template.template is not None:
            settings["chat_template"] = self._template.template.decode("utf-8", errors="replace")
        return settings

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        if self._renderer is None or self._renderer.process.poll() is not None:
            self._renderer = ChatRenderer()
        try:
            return self._renderer.render(self._template, messages, tools, variables)
        except InputError:
            raise
        except BaseException:
            self._renderer.close()
            self._renderer = None
            raise

    def facts(self) -> dict[str, Any]:
        """Return what `/props` tells."""
        engine = self.engine
        spec = engine.model.spec
        return {
            "model": self.options.name,
            "mode": self.mode,
            "verdict": self.options.verdict,
            "is_exact": engine.options.modes.is_exact,
            "answers_depend_on_other_requests": not engine.is_exact,
            "context": engine.memory.context,
            "slots": engine.options.slots,
            "queue": self.scheduler.options.queue,
            "sampling": sampling_fields(self.options.sampling),
            "prefill_tokens": self.scheduler.options.prefill_tokens,
            "deadline_s": self.options.deadline_s,
            "memory": engine.memory.to_plain(),
            "memory_shares": memory_shares(engine),
            "layers": spec.num_layers,
            "experts": [layer.experts.count for layer in spec.layers],
            "vocabulary": spec.vocab_size,
            "family": spec.family,
            "has_chat_template": any((self._template.template, b"chat_template" in (self._template.config or b""))),
            "thinks": self.chat_form.thinks or self.chat_form.is_harmony,
            "tools": self.tool_form,
        }


class TokenTexts:
    """Texts and bytes of tokens. A special token has its name. Bytes that are no text are written as `\\xf0\\x9f`."""

    def __init__(self, tokenizer: BundleTokenizer) -> None:
        self._tokenizer = tokenizer
        self._found: dict[int, tuple[str, bytes]] = {}
        self._bytes: TokenBytes | None
        try:
            self._bytes = tokenizer.token_bytes()
        except ValueError:  # its tokens stand for texts only
            self._bytes = None

    def of(self, token: int) -> tuple[str, bytes]:
        """Return the text of one token, with its leading space, and its bytes."""
        text = self._found.get(token)
        if text is None:
            text = self._found[token] = self._of(token)
        return text

    def _of(self, token: int) -> tuple[str, bytes]:
        if self._bytes is None:
            text = self._decoded(token)
            return text, text.encode("utf-8", errors="replace")
        data = self._bytes.of_token(token)
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in data), data

    def _decoded(self, token: int) -> str:
        piece, text = self._tokenizer.piece(token), self._tokenizer.decode([token])
        if not text or "\ufffd" in text:
            return piece
        return f" {text}" if piece.startswith(_PIECE_MARKS) and not text.startswith(" ") else text


class Inbox:
    """Events of the requests of one answer, from the engine's thread to the task that answers.

    receivers: take the events of each request, in the engine's thread.
    """

    def __init__(self, count: int, put: Callable[[Inbox, int, Event], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._events = deque[tuple[int, Event]]()
        self._waiter: asyncio.Future[None] | None = None
        self.receivers = [self._receiver(index, put) for index in range(count)]

    def _receiver(self, index: int, put: Callable[[Inbox, int, Event], None]) -> Callable[[Event], None]:
        return lambda event: put(self, index, event)

    def add(self, index: int, event: Event) -> None:
        """Add an event. Called in the loop."""
        self._events.append((index, event))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, timeout_s: float) -> list[tuple[int, Event]]:
        """Return all events, after waiting for one; an empty list after the time-out."""
        if not self._events:
            self._waiter = self.loop.create_future()
            timer = self.loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
        events = list(self._events)
        self._events.clear()
        return events


class EventPost:
    """Hands events to inboxes, those of a pass together.

    A crossing wakes the loop by a system call, which gives up the interpreter lock. With one crossing per event, the
    engine would wait for the loop after each of them.
    """

    def __init__(self) -> None:
        self._waiting = deque[tuple[Inbox, int, Event]]()

    def inbox(self, count: int) -> Inbox:
        """Return an inbox for the events of `count` requests."""
        return Inbox(count, self._put)

    def _put(self, inbox: Inbox, index: int, event: Event) -> None:
        self._waiting.append((inbox, index, event))

    def send(self) -> None:
        """Hand over all events that wait. Any thread may call this."""
        waiting = self._waiting
        if waiting:
            with contextlib.suppress(RuntimeError, IndexError):  # the loop has ended; another thread has sent them
                waiting[0][0].loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                inbox, index, event = self._waiting.popleft()
                inbox.add(index, event)


class MemoryShares(TypedDict):
    """Bytes of each part, as `/props` has them. All parts together are the budget."""

    process_bytes: int  # interpreter, libraries, tokenizer, manifest
    server_bytes: int  # HTTP, requests, log probabilities, and grammars of answers
    dense_bytes: int
    experts_bytes: int  # expert cache
    slot_bytes: int  # keys and values of one slot, which stay for the next turn of a conversation
    slots: int
    buffers_bytes: int  # the longest pass
    tables_bytes: int  # tables for reading ahead
    accelerator_bytes: int  # memory of the host that an accelerator needs
    unused_bytes: int | None  # for passes that need less to keep more experts; None without a budget


def memory_shares(engine: Engine) -> MemoryShares:
    """Return how the memory of an engine and its server is divided."""
    plan, slots, server = engine.memory, engine.options.slots, engine.options.other_bytes
    return {
        "process_bytes": plan.process_bytes - server,
        "server_bytes": server,
        "dense_bytes": plan.dense_bytes,
        "experts_bytes": plan.cache_bytes,
        "slot_bytes": plan.kv_bytes // slots,
        "slots": slots,
        "buffers_bytes": plan.scratch_bytes,
        "tables_bytes": plan.tables_bytes,
        "accelerator_bytes": plan.accelerator_bytes,
        "unused_bytes": None if plan.budget_bytes is None else plan.budget_bytes - plan.fixed_bytes - plan.cache_bytes,
    }
