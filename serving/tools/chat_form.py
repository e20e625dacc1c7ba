"""Facts of a chat template about the answers of its model: thinking, calls of tools, special tokens in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moec.runtime.text.tokenizer import BundleTokenizer

from . import harmony
from .calls import ToolsOfRequest
from .harmony import HarmonyParts
from .syntax import ToolSyntax, is_in, syntax_of, takes_tools
from .tagged_parts import CallSplitter, TaggedParts, ThinkingSplitter

_THINKING_MARKS = ("<think>", "</think>")


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
    is_harmony = is_in(harmony.SIGN, files)
    thinks = not is_harmony and any(is_in(mark, files) for mark in _THINKING_MARKS)
    syntax = None if is_harmony else syntax_of(files)
    marks = list(harmony.MARKS) if is_harmony else []
    marks += _THINKING_MARKS if thinks else ()
    marks += syntax.marks if syntax is not None else ()
    known = {token: mark for mark in marks if (token := tokenizer.id_of(mark)) is not None}
    hidden = {token: mark for token, mark in known.items() if not tokenizer.decode([token])}
    return ChatForm(thinks, takes_tools(files), is_harmony, syntax, hidden)
