"""Log probabilities in answers: their JSON, and the memory that they take until the client has read them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from moec.runtime.text.sampling import TokenLogProb
from moec.runtime.text.streaming_text import TextStream

from ..engine.request import Ended, TokenMade
from .errors import RequestError, bad_field
from .json_parts import EncodedList

TextOf: TypeAlias = Callable[[int], tuple[str, bytes]]
"""Returns the text and the bytes of a token."""
_LEAST_LOG_PROB = -9999.0
"""Stands for a probability of 0, which JSON cannot tell as a logarithm."""
_ENTRY_BYTES, _TOKEN_BYTES = 128, 512
"""Memory of one log probability as JSON, and of a token that has some."""
_LEAST_BYTES, _BYTES_PER_TOKEN = 4 << 20, 1 << 10
_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def log_probs_limit_bytes(context: int) -> int:
    """Return the most memory of the log probabilities of all open answers."""
    return _LEAST_BYTES + _BYTES_PER_TOKEN * context


class LogProbMemory:
    """Memory of the log probabilities of all open answers. It is counted before an answer begins.

    limit_bytes: most memory.
    held_bytes: memory of the answers that are open.
    """

    def __init__(self, context: int) -> None:
        self.limit_bytes, self.held_bytes = log_probs_limit_bytes(context), 0

    def needed_bytes(self, tokens: int, likeliest: int | None) -> int:
        """Return the memory of an answer. Raises RequestError if there is never as much.

        tokens: tokens that can get log probabilities.
        likeliest: likeliest tokens for each; None for no log probabilities.
        """
        if likeliest is None:
            return 0
        per_token = _TOKEN_BYTES + (1 + likeliest) * _ENTRY_BYTES
        if tokens * per_token > self.limit_bytes:
            most = self.limit_bytes // per_token
            raise bad_field("logprobs", f"asks for {tokens} tokens, and there is memory for {most}; lower `max_tokens`")
        return tokens * per_token

    def hold(self, size_bytes: int) -> None:
        """Count the memory of an answer that begins. Raises RequestError while other answers need it."""
        if size_bytes and self.held_bytes + size_bytes > self.limit_bytes:
            message = "log probabilities of other answers fill the memory for them"
            raise RequestError(429, message, None, "log_probs_full", {"Retry-After": "2"})
        self.held_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes


def log_prob_number(value: float) -> float:
    """Return a log probability that JSON can hold."""
    return value if math.isfinite(value) else _LEAST_LOG_PROB


def chat_log_prob(token: TokenLogProb, text_of: TextOf) -> dict[str, Any]:
    """Return one entry of `logprobs.content` of a chat."""

    def entry(index: int, value: float) -> dict[str, Any]:
        text, data = text_of(index)
        return {"token": text, "logprob": log_prob_number(value), "bytes": list(data)}

    likeliest = [entry(index, value) for index, value in token.likeliest]
    return {**entry(token.token_id, token.log_prob), "top_logprobs": likeliest}


class ShownTokens:
    """Tokens of a streamed answer whose text is shown. End tokens and tokens of a stop text are not among them.

    A token waits while its text does, because it may begin a stop text or a character.
    """

    def __init__(self) -> None:
        self._waiting = deque[tuple[int, TokenLogProb]]()
        self._shown = 0

    def add(self, event: TokenMade) -> list[TokenLogProb]:
        """Take a token, and return those that are shown with it."""
        if event.log_prob is None:
            return []
        self._waiting.append((event.start, event.log_prob))
        self._shown += len(event.text)
        shown = list[TokenLogProb]()
        while self._waiting and self._waiting[0][0] < self._shown:
            shown.append(self._waiting.popleft()[1])
        return shown

    def end(self, event: Ended) -> list[TokenLogProb]:
        """Return the rest at the end of an answer. An answer that was cut has no end token."""
        return [token for _, token in self._waiting] if event.reason == "length" else []


class CompletionLogProbs:
    """`logprobs` of one completion: lists with an entry for each token.

    text_of: returns the text and the bytes of a token.
    stream: turns the tokens into the text in which offsets are counted, characters.
    keeps: whether to keep all entries for a whole answer.
    """

    def __init__(self, text_of: TextOf, stream: TextStream, keeps: bool) -> None:
        self._text_of, self._stream, self._keeps = text_of, stream, keeps
        self._length = 0
        self.whole: dict[str, EncodedList] = {name: EncodedList() for name in _COLUMNS}

    def of_prompt(self, first: int, rest: Sequence[TokenLogProb]) -> dict[str, list[Any]]:
        """Return the entries of a prompt. Its first token has no log probability."""
        entries: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self._add(entries, first, None, None)
        return self._with_tokens(entries, rest)

    def of_tokens(self, tokens: Iterable[TokenLogProb]) -> dict[str, list[Any]]:
        """Return the entries of tokens of the answer."""
        return self._with_tokens({name: [] for name in _COLUMNS}, tokens)

    def _with_tokens(self, entries: dict[str, list[Any]], tokens: Iterable[TokenLogProb]) -> dict[str, list[Any]]:
        for token in tokens:
            likeliest = {self._text_of(index)[0]: log_prob_number(value) for index, value in token.likeliest}
            log_prob = log_prob_number(token.log_prob)
            self._add(entries, token.token_id, log_prob, {**likeliest, self._text_of(token.token_id)[0]: log_prob})
        if self._keeps:
            for name, values in entries.items():
                self.whole[name].extend(values)
        return entries

    def _add(
        self, entries: dict[str, list[Any]], token: int, log_prob: float | None, likeliest: dict[str, float] | None
    ) -> None:
        for name, value in zip(_COLUMNS, (self._text_of(token)[0], log_prob, likeliest, self._length), strict=True):
            entries[name].append(value)
        self._length += len(self._stream.push(token))
