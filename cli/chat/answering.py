"""One answer of the model: streamed to stdout, stopped by Ctrl-C or where it repeats itself, counted."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..terminal import output

if TYPE_CHECKING:
    from moec.runtime.engine.engine import Engine
    from moec.runtime.text.sampling import SamplingOptions
    from moec.runtime.trace.statistics import RunStatistics

_FORCED_AFTER = 3
"""Interrupts of one answer after which the program ends, because a pass does not come to its end."""
_LONGEST_PERIOD = 32
_LEAST_PERIODS = 8
_LEAST_REPEATED_TOKENS = 64


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
