"""The form of a model's answers: thinking, text, calls of tools, and how they are separated as they stream.

Source of the form of gpt-oss, messages in channels: the public description of the harmony response format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from moec.manifests.thinking import CLOSE, OPEN, ThinkingSplitter, knows_thinking, overlap
from moec.runtime.text.tokenizer import BundleTokenizer

from .calls import Parameters, ToolCall, ToolsOfRequest, ToolSyntax, is_in, syntax_of, takes_tools

_MAX_CALL_CHARACTERS = 1 << 20
_HARMONY_SIGN = "<|channel|>"
_HARMONY_MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
"""Special tokens that separate the parts of an answer. They must be part of its text here."""
_HEAD_END, _ENDS = "<|message|>", re.compile(r"<\|(?:end|call|return|start)\|>")
_RECIPIENT, _CHANNEL = re.compile(r"to=functions\.([\w.\-]+)"), re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True, slots=True)
class ChatForm:
    """The form of a model's answers.

    thinks: the template knows `<think>`.
    takes_tools: the template takes tools.
    is_harmony: answers are messages in channels, as those of gpt-oss.
    syntax: the form of calls; None if it is not known.
    marks: special tokens that separate parts of an answer -> their text.
    """

    thinks: bool
    takes_tools: bool
    is_harmony: bool
    syntax: ToolSyntax | None
    marks: dict[int, str]

    def parts(self, starts_thinking: bool, tools: ToolsOfRequest) -> HarmonyParts | TaggedParts:
        """Return what splits one answer. starts_thinking: the prompt ends inside `<think>`."""
        most = None if tools.is_parallel else 1
        if self.is_harmony:
            return HarmonyParts(most)
        thinking = ThinkingSplitter(starts_thinking) if self.thinks else None
        calls = CallSplitter(self.syntax, tools.parameters) if self.syntax is not None and tools.described else None
        return TaggedParts(thinking, calls, most)


def chat_form_of(files: Sequence[bytes], tokenizer: BundleTokenizer) -> ChatForm:
    """Return the form of the answers of a model, by the files of its template."""
    is_harmony = is_in(_HARMONY_SIGN, files)
    thinks = not is_harmony and knows_thinking(files)
    syntax = None if is_harmony else syntax_of(files)
    marks = list(_HARMONY_MARKS) if is_harmony else []
    marks += (OPEN, CLOSE) if thinks else ()
    marks += syntax.marks if syntax is not None else ()
    known = {token: mark for mark in marks if (token := tokenizer.id_of(mark)) is not None}
    hidden = {token: mark for token, mark in known.items() if not tokenizer.decode([token])}
    return ChatForm(thinks, takes_tools(files), is_harmony, syntax, hidden)


class TaggedParts:
    """Thinking between `<think>` tags, and calls between the marks of a template.

    calls: the calls that are complete, in their order.
    thoughts: number of pieces that are thinking or a tag around it.
    """

    def __init__(
        self, thinking: ThinkingSplitter | None, calls: CallSplitter | None, most_calls: int | None = None
    ) -> None:
        """thinking, calls: None where the answer has none.

        most_calls: calls beyond this number are left out; None for all.
        """
        self.calls, self.thoughts = list[ToolCall](), 0
        self._thinking, self._splitter, self._most_calls = thinking, calls, most_calls

    def push(self, piece: str) -> list[tuple[bool, str]]:
        """Add a piece. Returns texts that can be shown now, as (is thinking, text)."""
        if self._thinking is None:
            return self._without_calls([(False, piece)] if piece else [])
        was_thinking = self._thinking.is_thinking
        parts = self._thinking.push(piece)
        self.thoughts += was_thinking or self._thinking.is_thinking
        return self._without_calls(parts)

    def flush(self) -> list[tuple[bool, str]]:
        """Return the texts that were held back, at the end of the answer."""
        parts = self._without_calls([] if self._thinking is None else self._thinking.flush())
        if self._splitter is None:
            return parts
        text, calls = self._splitter.flush()
        self._add(calls)
        return [*parts, (False, text)] if text else parts

    def _without_calls(self, parts: list[tuple[bool, str]]) -> list[tuple[bool, str]]:
        if self._splitter is None:
            return parts
        texts = list[tuple[bool, str]]()
        for is_thought, text in parts:
            shown = text
            if not is_thought:
                shown, calls = self._splitter.push(text)
                self._add(calls)
            if shown:
                texts.append((is_thought, shown))
        return texts

    def _add(self, calls: list[ToolCall]) -> None:
        self.calls = (self.calls + calls)[: self._most_calls]


class CallSplitter:
    """Takes calls out of a streamed text. Text that may begin a call is held back.

    What looks like a call and cannot be read stays text, so that nothing is lost.
    """

    def __init__(self, syntax: ToolSyntax, parameters: Parameters) -> None:
        self._syntax, self._parameters = syntax, parameters
        self._unread, self._is_inside, self._has_calls = "", False, False

    def push(self, piece: str) -> tuple[str, list[ToolCall]]:
        """Add a piece. Returns the text that can be shown now, and the calls that are complete."""
        self._unread += piece
        shown, calls = "", list[ToolCall]()
        while True:
            if not self._is_inside:
                before, mark, after = self._unread.partition(self._syntax.begin)
                size = len(before) if mark else len(before) - overlap(before, self._syntax.begin)
                shown += self._without_gaps(before[:size])
                self._unread = after if mark else before[size:]
                self._is_inside = bool(mark)
                if not mark:
                    return shown, calls
            if not self._syntax.end or self._syntax.end not in self._unread:
                return shown, calls
            inside, _, self._unread = self._unread.partition(self._syntax.end)
            self._is_inside = False
            shown += self._take(inside, self._syntax.end, calls)

    def flush(self) -> tuple[str, list[ToolCall]]:
        """Return what was held back, at the end of the text. A call may end with the answer."""
        unread, self._unread = self._unread, ""
        calls = list[ToolCall]()
        if not self._is_inside:
            return self._without_gaps(unread), calls
        self._is_inside = False
        return self._take(unread, "", calls), calls

    def _take(self, inside: str, end: str, calls: list[ToolCall]) -> str:
        """Add the calls of a text between marks. Returns the text if it has none."""
        parsed = self._syntax.parse(inside, self._parameters) if len(inside) <= _MAX_CALL_CHARACTERS else None
        if parsed is None:
            return f"{self._syntax.begin}{inside}{end}"
        calls += parsed
        self._has_calls = True
        return ""

    def _without_gaps(self, text: str) -> str:
        """Return text outside of calls. White space between and after them is left out."""
        return text if not self._has_calls or text.strip() else ""


class HarmonyParts:
    """Splits a streamed answer of gpt-oss into thinking (`analysis`), text (`final`, `commentary`), and calls of tools.

    most_calls, calls, thoughts: as in `TaggedParts`.
    """

    def __init__(self, most_calls: int | None = None) -> None:
        self.calls, self.thoughts, self._most_calls = list[ToolCall](), 0, most_calls
        self._unread = ""
        self._is_in_body, self._is_thought = False, False
        self._tool: str | None = None
        self._arguments = list[str]()

    def push(self, piece: str) -> list[tuple[bool, str]]:
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
                shown = len(self._unread) - max(overlap(self._unread, mark) for mark in _HARMONY_MARKS)
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
        elif self._unread and not any(mark in self._unread for mark in _HARMONY_MARKS):  # an answer without channels
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
