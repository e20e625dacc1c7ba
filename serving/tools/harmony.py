"""The answers of gpt-oss: messages in channels, with thinking, text and calls of tools.

Source of the form: the public description of the harmony response format.
"""

from __future__ import annotations

import re

from .calls import ToolCall

SIGN = "<|channel|>"
MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
"""Special tokens that separate the parts of an answer. They must be part of its text here."""
_HEAD_END, _ENDS = "<|message|>", re.compile(r"<\|(?:end|call|return|start)\|>")
_RECIPIENT, _CHANNEL = re.compile(r"to=functions\.([\w.\-]+)"), re.compile(r"<\|channel\|>\s*(\w+)")
_LONGEST_MARK = max(map(len, MARKS))


class HarmonySplitter:
    """Splits a streamed answer into thinking (`analysis`), text (`final`, `commentary`), and calls of tools."""

    def __init__(self) -> None:
        self._held, self._head = "", ""
        self._is_in_body, self._is_thought = False, False
        self._tool: str | None = None
        self._arguments = list[str]()

    @property
    def is_thinking(self) -> bool:
        """True inside the thinking."""
        return self._is_in_body and self._is_thought

    def push(self, piece: str) -> tuple[list[tuple[bool, str]], list[ToolCall]]:
        """Add a piece. Returns texts that can be shown now, as (is thinking, text), and calls that are complete."""
        texts, calls = list[tuple[bool, str]](), list[ToolCall]()
        self._held += piece
        while self._held:
            if not self._is_in_body:
                head, mark, after = self._held.partition(_HEAD_END)
                if not mark:
                    break
                self._begin(head)
                self._held = after
                continue
            end = _ENDS.search(self._held)
            if end is None:
                kept = self._kept()
                self._body(self._held[: len(self._held) - kept], texts)
                self._held = self._held[len(self._held) - kept :]
                break
            self._body(self._held[: end.start()], texts)
            self._held = self._held[end.end() :]
            self._close(calls)
        return texts, calls

    def flush(self) -> tuple[list[tuple[bool, str]], list[ToolCall]]:
        """Return what was held back. A call ends with the answer, because `<|call|>` is an end token."""
        texts, calls = list[tuple[bool, str]](), list[ToolCall]()
        if self._is_in_body:
            self._body(self._held, texts)
            self._close(calls)
        elif self._held and not any(mark in self._held for mark in MARKS):  # an answer without channels
            texts.append((False, self._held))
        self._held = ""
        return texts, calls

    def _begin(self, head: str) -> None:
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        self._tool = None if recipient is None else recipient.group(1)
        self._is_thought = channel is not None and channel.group(1) == "analysis" and self._tool is None
        self._is_in_body, self._arguments = True, []

    def _body(self, text: str, texts: list[tuple[bool, str]]) -> None:
        if self._tool is not None:
            self._arguments.append(text)
        elif text:
            texts.append((self._is_thought, text))

    def _close(self, calls: list[ToolCall]) -> None:
        if self._tool is not None:
            calls.append(ToolCall(self._tool, "".join(self._arguments).strip() or "{}"))
        self._tool, self._is_in_body = None, False

    def _kept(self) -> int:
        """Return the length of the end of the held text that may begin a mark."""
        for size in range(min(_LONGEST_MARK - 1, len(self._held)), 0, -1):
            if any(mark.startswith(self._held[-size:]) for mark in MARKS):
                return size
        return 0
