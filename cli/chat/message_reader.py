"""Read the user's messages: a line each, or several lines."""

from __future__ import annotations

import contextlib
import sys

from moec.manifests.errors import ContextOverflow, ExecutionError, InputError

from ..terminal import output

QUOTES = '"""'
"""A line that begins and one that ends a message of several lines."""
_CONTINUES = "\\"


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
