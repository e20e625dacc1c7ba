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


class HarmonyParts:
    """Splits a streamed answer into thinking (`analysis`), text (`final`, `commentary`), and calls of tools.

    most_calls, calls, thoughts: as in `TaggedParts`.
    """

    def __init__(self, most_calls: int | None = None) -> None:
        self.calls, self.thoughts, self._most_calls = list[ToolCall](), 0, most_calls
        self._unread = ""
        self._is_in_body, self._is_thought = False, False
        self._tool: str | None = None
        self._arguments = list[str]()

    def push(self, piece: str) -> list[tuple[bool, str]]:
        """Add a piece. Returns texts that can be shown now, as (is thinking, text)."""
        was_thinking = self._is_in_body and self._is_thought
        texts = list[tuple[bool, str]]()
        self._unread += piece
        while self._unread:
            if not self._is_in_body:
                head, mark, after = self._unread.partition(_HEAD_END)
                if not mark:
                    break
                self._begin(head)
                self._unread = after
                continue
            end = _ENDS.search(self._unread)
            if end is None:
                shown = len(self._unread) - self._overlap()
                self._body(self._unread[:shown], texts)
                self._unread = self._unread[shown:]
                break
            self._body(self._unread[: end.start()], texts)
            self._unread = self._unread[end.end() :]
            self._close()
        self.thoughts += was_thinking or (self._is_in_body and self._is_thought)
        return texts

    def flush(self) -> list[tuple[bool, str]]:
        """Return what was held back. A call ends with the answer, because `<|call|>` is an end token."""
        texts = list[tuple[bool, str]]()
        if self._is_in_body:
            self._body(self._unread, texts)
            self._close()
        elif self._unread and not any(mark in self._unread for mark in MARKS):  # an answer without channels
            texts.append((False, self._unread))
        self._unread = ""
        return texts

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

    def _close(self) -> None:
        if self._tool is not None:
            call = ToolCall(self._tool, "".join(self._arguments).strip() or "{}")
            self.calls = [*self.calls, call][: self._most_calls]
        self._tool, self._is_in_body = None, False

    def _overlap(self) -> int:
        """Return the length of the end of the text that may begin a mark."""
        for size in range(min(_LONGEST_MARK - 1, len(self._unread)), 0, -1):
            if any(mark.startswith(self._unread[-size:]) for mark in MARKS):
                return size
        return 0
