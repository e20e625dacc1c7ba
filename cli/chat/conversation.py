"""A conversation: its messages, the text that the model reads for the next one, and each answer.

An answer is streamed to stdout. Ctrl-C stops it, and so does a text that repeats itself.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from moec.manifests.errors import InputError, OptionError

from ..terminal import output

if TYPE_CHECKING:
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.engine.engine import Engine
    from moec.runtime.text.sampling import SamplingOptions
    from moec.runtime.text.template_process import Message, TemplateFiles
    from moec.runtime.trace.statistics import RunStatistics

_FORCED_AFTER = 3
"""Interrupts of one answer after which the program ends, because a pass does not come to its end."""
_LONGEST_PERIOD = 32
_LEAST_PERIODS = 8
_LEAST_REPEATED_TOKENS = 64


def chat_template(bundle: Bundle, verify: bool) -> TemplateFiles | None:
    """Return the files of a bundle's chat template, or None without one. The template is tried with one message.

    verify: whether to compare each file with its digest.
    Raises the errors of `template_files`, and ManifestInvalid for a damaged template.
    """
    from moec.runtime.text.template_process import ChatRenderer, template_files

    files = template_files(bundle, verify)
    try:
        with ChatRenderer() as renderer:
            renderer.render(files, [{"role": "user", "content": "hello"}])
    except OptionError:
        return None
    except InputError:
        pass  # it wants other messages; the first turn says so
    return files


class Conversation:
    """Messages so far.

    template: files of the chat template. None: the model continues the messages as plain text.
    system: message before the others, or None.
    messages: messages of user and assistant, in turns.
    """

    def __init__(self, template: TemplateFiles | None, system: str | None) -> None:
        self.template, self.messages = template, list[dict[str, str]]()
        self.system: str | None = None
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Set the system message; None removes it. Raises OptionError without a template."""
        if text is not None and self.template is None:
            raise OptionError("a system message needs a chat template, and the messages are plain text", "leave it out")
        self.system = text

    @property
    def adds_special_tokens(self) -> bool:
        """True if the tokenizer adds its special tokens. A rendered chat has them already."""
        return self.template is None

    def text_with(self, message: str) -> str:
        """Return the text that the model reads, with the user's next message at its end.

        Raises the errors of ChatRenderer.render.
        """
        messages = [*self.all_messages(), {"role": "user", "content": message}]
        if self.template is None:
            return plain_text(messages)
        from moec.runtime.text.template_process import ChatRenderer

        with ChatRenderer() as renderer:  # ends before the model runs, whose budget has no place for the process
            return renderer.render(self.template, messages)

    def add(self, message: str, answer: str) -> None:
        """Add a finished turn."""
        self.messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Remove all messages. The system message stays."""
        self.messages.clear()

    def all_messages(self) -> list[dict[str, str]]:
        """Return all messages, the system message first."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]


def plain_text(messages: Sequence[Message]) -> str:
    """Return messages as one text, as a terminal shows them: each message of the user begins a line."""
    text = ""
    for message in messages:
        if message["role"] == "user" and text and not text.endswith("\n"):
            text += "\n"
        text += message["content"]
    return text


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Options of all answers. The fields are the parameters of `Engine.generate`."""

    max_new_tokens: int
    sampling: SamplingOptions
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    finish_reason: that of the last step, `repetition` if the answer repeated itself, None if the user stopped it.
    prompt_tokens: tokens of the conversation before it.
    reused_tokens: number of them that were not computed again.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    prompt_tokens: int
    reused_tokens: int
    statistics: RunStatistics

    def to_plain(self) -> dict[str, Any]:
        """Return the values for `--json`."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "statistics": self.statistics.to_plain(),
        }


def answer(engine: Engine, tokens: list[int], options: AnswerOptions, *, is_shown: bool, can_stop: bool) -> Answer:
    """Return the answer to a prompt. What the engine's slot holds of the prompt is not computed again.

    is_shown: print the text as it is decoded.
    can_stop: let an interrupt end the answer instead of the program.
    Raises the errors of `Engine.generate`. Raises KeyboardInterrupt after several interrupts.
    """
    from moec.runtime.trace.statistics import RunRecorder

    recorder, pieces, ids = RunRecorder(len(tokens)), list[str](), list[int]()
    reason: str | None = None
    reused = 0
    with _stopped_by_interrupt(can_stop) as is_stopped:
        for step in engine.generate(
            tokens, options.max_new_tokens, options.sampling, options.stop, reuses_prefix=True, is_stopped=is_stopped
        ):
            recorder.add(step.elapsed_ns, step.cache)
            pieces.append(step.text)
            ids.append(step.token_id)
            reason, reused = step.finish_reason, step.reused_tokens
            if is_shown and step.text:
                show(step.text)
            if reason is None and repeated_tokens(ids):
                reason = "repetition"
                break
    if is_shown:
        output.data("")
    statistics = recorder.finish(engine.model.prefetch_quality.recall)
    return Answer("".join(pieces), ids, reason, len(tokens), reused, statistics)


def repeated_tokens(ids: list[int]) -> int:
    """Return the number of tokens that an answer repeats at its end, again and again; 0 if it does not.

    At most 32 tokens are repeated, at least 8 times and over 64 tokens.
    """
    for period in range(1, _LONGEST_PERIOD + 1):
        length = max(_LEAST_PERIODS * period, _LEAST_REPEATED_TOKENS)
        if len(ids) < length:
            return 0
        if ids[-1] == ids[-1 - period] and ids[-length:-period] == ids[period - length :]:
            return period
    return 0


def show(text: str) -> None:
    """Write text of a model to stdout: unchanged into a file or a pipe, without control characters to a terminal."""
    if sys.stdout is not None and sys.stdout.isatty():
        output.data(text, end="")
    else:
        output.generated(text)


@contextmanager
def _stopped_by_interrupt(can_stop: bool) -> Iterator[Callable[[], bool]]:
    """Yield what says whether an interrupt has ended the answer. A pass is never torn, so the engine stays sound."""
    count = 0
    if not can_stop:
        yield lambda: False
        return

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count >= _FORCED_AFTER:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, before)
