"""The loop of a chat: a message of one or several lines or a command, then an answer."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moec.manifests.errors import ContextOverflow, ExecutionError, InputError, OptionError
from moec.manifests.files.output_file import write_output

from ..options.paths import path_fault
from ..terminal import output
from ..terminal.run_statistics import statistics_block
from .conversation import Answer, AnswerOptions, Conversation, answer, plain_text, repeated_tokens

QUOTES = '"""'
"""A line that begins and one that ends a message of several lines."""
_CONTINUES = "\\"

if TYPE_CHECKING:
    from moec.runtime.engine.engine import Engine

HELP = (
    ("/reset", "forget all messages"),
    ("/system TEXT", "set the system message; without TEXT, remove it"),
    ("/stats", "show the statistics of the last answer"),
    ("/save FILE", "write the conversation to a file, as JSON"),
    ("/help", "show this list"),
    ("/exit", "end the chat, as Ctrl-D does"),
    ("//TEXT", "send a message that begins with a slash"),
    ("text \\", "continue the message on the next line"),
    ('"""', "begin and end a message of several lines"),
    ("Ctrl-C", "stop the answer"),
)


class ChatSession:
    """One conversation with one engine.

    name: name of the bundle, for `/save`.
    as_json: print an object for each answer instead of its text.
    """

    def __init__(
        self,
        engine: Engine,
        conversation: Conversation,
        reader: MessageReader,
        options: AnswerOptions,
        name: str,
        as_json: bool,
    ) -> None:
        self._engine, self._conversation, self._reader = engine, conversation, reader
        self._options, self._name, self._as_json = options, name, as_json
        self._saved = set[Path]()
        self._last: Answer | None = None
        self._answers = 0

    def run(self) -> None:
        """Read messages and answer them until the input ends.

        A person may go on after a refused message. A script ends with the error.
        Raises the errors of an answer, and those of the files of `/save`.
        """
        while True:
            try:
                message = self._reader.read()
                if message is None or not self._take(message):
                    return
            except KeyboardInterrupt:
                if not self._reader.is_terminal:
                    raise
                output.say("\n(Ctrl-D or /exit ends the chat)")
            except (InputError, OptionError, ContextOverflow) as problem:
                if not self._reader.is_terminal:
                    raise
                output.error(problem)
                if isinstance(problem, ContextOverflow):
                    output.say("/reset forgets the conversation")

    def _take(self, message: str) -> bool:
        """Answer a message, or do what a command says. Returns False at the end of the chat."""
        word, _, rest = message.partition(" ")
        rest = rest.strip()
        if message.startswith("//"):
            self._answer(message[1:])
        elif not message.startswith("/"):
            if message.strip():
                self._answer(message)
        elif word == "/exit":
            return False
        elif word == "/reset":
            self._conversation.reset()
            output.say("the conversation begins anew")
        elif word == "/system":
            self._conversation.set_system(rest or None)
            output.say("the next answer follows the system message" if rest else "there is no system message")
        elif word == "/stats":
            output.say(self._statistics())
        elif word == "/save":
            self._save(rest)
        elif word == "/help":
            output.say(output.facts(HELP))
        else:
            raise InputError(f"`{word[:40]}` is no command of the chat", "see /help; `//` sends a slash")
        return True

    def _answer(self, message: str) -> None:
        """Answer a message and add both to the conversation. A refused message is not added.

        Answer i has the seed and i, so that the same question can have another answer.
        """
        text = self._conversation.text_with(message)
        tokens = self._engine.encode(text, self._conversation.adds_special_tokens)
        sampling = replace(self._options.sampling, seed=self._options.sampling.seed + self._answers)
        self._answers += 1
        options, is_terminal = replace(self._options, sampling=sampling), self._reader.is_terminal
        reply = answer(self._engine, tokens, options, is_shown=not self._as_json, can_stop=is_terminal)
        self._last = reply
        if self._as_json:
            output.data_json(reply.to_plain())
        count = len(reply.token_ids)
        if not count:
            output.say("stopped before the first token; the message is not kept")
            return
        self._conversation.add(message, reply.text)
        if reply.finish_reason is None:
            output.say("(stopped)")
        elif reply.finish_reason == "repetition":
            output.say(f"(ended: the last {repeated_tokens(reply.token_ids)} tokens were repeated again and again)")
        elif reply.finish_reason == "length" and count < options.max_new_tokens:
            context = self._engine.memory.context
            output.say(f"(the context of {context} tokens is full; /reset forgets the conversation)")
        elif reply.finish_reason == "length":
            output.say(f"(cut after {count} tokens; --max-new-tokens allows more)")

    def _statistics(self) -> str:
        last = self._last
        if last is None:
            return "there is no answer yet"
        counts = None if self._engine.mode_counts is None else self._engine.mode_counts.to_plain()
        used = f"{last.prompt_tokens + len(last.token_ids)} of {self._engine.memory.context} tokens"
        reused = f"{last.reused_tokens} of {last.prompt_tokens} reused by the last answer"
        pairs = [("conversation", f"{len(self._conversation.messages)} messages"), ("context", f"{used}, {reused}")]
        return f"{output.facts(pairs)}\n{statistics_block(last.statistics, counts)}"

    def _save(self, name: str) -> None:
        """Write the conversation. A file that this chat did not write is never replaced.

        Raises InputError, DoesNotFit.
        """
        if (fault := path_fault(os.path.expanduser(name))) is not None:
            raise InputError(fault, "name a file: /save chat.json")
        path = Path(os.path.expanduser(name)).absolute()
        if path not in self._saved and os.path.lexists(path):
            raise InputError(f"`{name}` exists", "name another file")
        messages = self._conversation.all_messages()
        content = {"bundle": self._name, "mode": self._engine.mode.removeprefix("mode: "), "messages": messages}
        if self._conversation.template is None:
            content["text"] = plain_text(messages)
        write_output(path, json.dumps(content, indent=1).encode() + b"\n")
        self._saved.add(path)
        output.say(f"{len(messages)} messages in `{name}`")


class MessageReader:
    """Messages from standard input.

    A line that ends with a backslash continues on the next one. Lines between two lines of three quotes are one
    message. With a terminal on both sides, lines can be edited and earlier ones called back.

    limit_bytes: most bytes of a message.
    is_terminal: whether a person types.
    """

    def __init__(self, limit_bytes: int) -> None:
        if sys.stdin is None:
            raise InputError("standard input is closed, expected messages", "start `moec chat` in a terminal")
        self._limit_bytes = limit_bytes
        self.is_terminal = sys.stdin.isatty()
        self._is_edited = self.is_terminal and sys.stdout is not None and sys.stdout.isatty()
        if self._is_edited:
            with contextlib.suppress(ImportError):  # without it `input` has no editing
                import readline  # noqa: F401 - `input` uses it when it is loaded

    def read(self) -> str | None:
        """Return the next message, or None at the end of the input.

        Raises ContextOverflow for one that is too long, ExecutionError if the input fails, KeyboardInterrupt.
        """
        line = self._line("> ")
        if line is None:
            return None
        lines = list[str]()
        if line.strip() == QUOTES:
            while (line := self._line(". ")) is not None and line.strip() != QUOTES:
                lines.append(line)
                self._check(lines)
            return "\n".join(lines)
        while line is not None and line.endswith(_CONTINUES):
            lines.append(line[:-1])
            self._check(lines)
            line = self._line(". ")
        if line is not None:
            lines.append(line)
            self._check(lines)
        return "\n".join(lines)

    def _line(self, prompt: str) -> str | None:
        try:
            if self._is_edited:
                with contextlib.suppress(EOFError):
                    return input(prompt)
                return None
            if self.is_terminal:
                output.say(prompt, end="")
            line = sys.stdin.readline(self._limit_bytes + 2)
        except OSError as error:
            raise ExecutionError(
                f"standard input cannot be read: {error.strerror}", "check where it comes from"
            ) from error
        if not line:
            return None
        return line.removesuffix("\n").removesuffix("\r")

    def _check(self, lines: list[str]) -> None:
        size = sum(len(line.encode("utf-8", "surrogateescape")) + 1 for line in lines)
        if size > self._limit_bytes:
            raise ContextOverflow(
                f"the message has more than {self._limit_bytes} bytes, which is more than the context holds",
                "shorten it or raise `--context`",
            )
