"""A request to the engine, and the events that answer it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import numpy as np

from moec.runtime.text.sampling import SamplingOptions, TokenLogProb

FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Timings:
    """Times and cache counts of one request. Passes are shared, so the counts include experts of other requests.

    prompt_tokens, answer_tokens: tokens of the prompt, and of the answer with its end token.
    cached_tokens: tokens of the prompt whose keys and values were in memory.
    queue_ns: time until the request got a slot.

    ttft_ns: time from the arrival to the first token; None without a token.
    tpot_ns: mean time per token after the first one; None without such tokens.
    lookups, hits: requests of experts, and those that found their expert in memory.
    bytes_read: bytes of experts read, those read ahead included.
    stall_ns: time in which a layer waited for reads.
    running_ns: time of the passes that the request took part in.
    """

    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int
    queue_ns: int
    ttft_ns: int | None
    tpot_ns: float | None
    lookups: int
    hits: int
    bytes_read: int
    stall_ns: int
    running_ns: int

    def to_plain(self) -> dict[str, float | int | None]:
        """Return the `timings` object of an answer. Times are in milliseconds."""
        tokens = max(self.answer_tokens, 1)
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.answer_tokens,
            "queue_ms": _ms(self.queue_ns),
            "ttft_ms": _ms(self.ttft_ns),
            "tpot_ms": _ms(self.tpot_ns),
            "tokens_per_s": round(1e9 / self.tpot_ns, 3) if self.tpot_ns else None,
            "hit_rate": round(self.hits / self.lookups, 4) if self.lookups else 1.0,
            "bytes_read": self.bytes_read,
            "bytes_read_per_token": round(self.bytes_read / tokens, 1),
            "waiting_share": round(self.stall_ns / self.running_ns, 4) if self.running_ns else 0.0,
        }


def _ms(time_ns: float | None) -> float | None:
    return None if time_ns is None else round(time_ns / 1e6, 3)


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The log probabilities of a prompt's tokens. The first token has none."""

    tokens: tuple[TokenLogProb, ...]


@dataclass(frozen=True, slots=True)
class TokenMade:
    """One token of an answer.

    text: text that can be shown now; may be empty.
    log_prob: None if the request asks for none.
    start: characters of the answer before the token's own text. An end token has no text.
    """

    token_id: int
    text: str
    log_prob: TokenLogProb | None
    start: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an answer.

    reason: `stop` after an end token or a stop text, `length` at the limit.
    stop_text: the stop text that ended it, or None.
    """

    reason: FinishReason
    stop_text: str | None
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request without an answer.

    code: `deadline_exceeded`, `cancelled`, `shutting_down`, `engine_failed`, or the name of an error.
    """

    code: str
    message: str


class AnswerMask(Protocol):
    """Follows one answer, and says which tokens may come next. Its errors end the answer."""

    def allowed(self) -> np.ndarray | None:
        """Return the tokens that may come next, bool [V]; None for all."""

    def take(self, token: int) -> bool:
        """Take the next token. Returns whether the answer is complete."""


Event: TypeAlias = PromptScored | TokenMade | Ended | Failed


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """One text to continue.

    tokens: the prompt. It was checked against vocabulary and context.
    max_new_tokens: most tokens of the answer; 0 scores the prompt only.
    stop: texts that end the answer.

    log_probs: number of likeliest tokens to tell for each token of the answer; None for no log probabilities.
    scores_prompt: tell the log probabilities of the prompt, too. Then no keys and values are reused.

    marks: special tokens that are part of the answer's text -> their text.
    mask: the tokens of the answer that may come next; None for all tokens.
    deadline_s: seconds until the request ends without an answer; None for no limit.
    deliver: called in the engine's thread with each event. It must not block.
    is_cancelled: set by `cancel`. The engine reads it before every pass.
    arrived_ns: time of arrival by `time.perf_counter_ns`.
    """

    tokens: list[int]
    max_new_tokens: int
    deliver: Callable[[Event], None]
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()
    log_probs: int | None = None
    scores_prompt: bool = False
    deadline_s: float | None = None
    mask: AnswerMask | None = None
    marks: Mapping[int, str] = field(default_factory=dict)
    is_cancelled: bool = False
    arrived_ns: int = field(default_factory=time.perf_counter_ns)

    def cancel(self) -> None:
        """End the request before the next pass. Any thread may call this."""
        self.is_cancelled = True

    def is_late(self, now_ns: int) -> bool:
        return self.deadline_s is not None and now_ns - self.arrived_ns > self.deadline_s * 1e9
