"""A model of lm-evaluation-harness on an engine. Import it after `lm_eval` is known to be installed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from moec.manifests.errors import OptionError
from moec.manifests.progress import Progress

from ..tasks.task_settings import ChatTemplate
from .engine import (
    AnswerRequest,
    ContextGroup,
    ContinuationScore,
    HarnessEngine,
    answer_settings,
    by_context,
    longest_first,
    shortened,
)

K = TypeVar("K")

DEFAULT_NEW_TOKENS = 256
"""Most tokens of an answer whose task names no number, as in the harness."""

Pair = tuple[Any, list[int], list[int]]
"""Texts of a request, tokens of its context, and of its continuation."""


class BundleLM(TemplateLM):  # type: ignore[misc]
    """A bundle as a model of the harness.

    shortened: number of requests whose context lost its beginning, because it did not fit.
    is_working: True while a request is computed, and after one has failed.
    """

    def __init__(
        self,
        open_engine: Callable[[], HarnessEngine],
        chat: ChatTemplate | None,
        progress: Callable[[str], AbstractContextManager[Progress]],
        seed: int,
    ) -> None:
        """open_engine: called once, before the first request is computed.

        chat: the chat template, if prompts are rendered with it. Rendered prompts get no special tokens.
        progress: opens a display for work of a name.
        seed: seed of sampled answers.
        """
        super().__init__()
        self._open = open_engine
        self._opened: HarnessEngine | None = None
        self._chat, self._progress, self._seed = chat, progress, seed
        self.shortened, self.is_working = 0, False

    @property
    def engine(self) -> HarnessEngine:
        """The engine. It is opened late, so that its budget counts the memory of tasks and requests."""
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    @property
    def backend(self) -> str:
        """The harness's name for the way in which contexts are read."""
        return "seq2seq" if self.engine.has_encoder else "causal"

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.engine.end_token

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: the start token, or else the end token, as in the harness."""
        start = self.engine.start_token
        return self.engine.end_token if start is None else start

    @property
    def max_length(self) -> int:
        """Most positions of a sequence."""
        return self.engine.context

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's own caches, which are not used."""
        return "moec"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text. None: special tokens are added, unless a chat template has written them."""
        adds = self._chat is None if add_special_tokens is None else add_special_tokens
        return self.engine.encode(string, adds)

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the model reads it, up to the next answer or to the end of one that was begun.

        Raises OptionError if there is no template, InputError if it refuses the messages.
        """
        if self._chat is None:
            raise OptionError("the run has no chat template", "add `--apply-chat-template`")
        if add_generation_prompt:
            return self._chat.render(chat_history)
        return self._chat.render(chat_history[:-1]) + chat_history[-1]["content"]

    # -- log-likelihoods ---------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return log-likelihood and greediness of each continuation. Texts become tokens when their turn comes."""

        def groups() -> Iterator[tuple[ContextGroup, list[int]]]:
            for indices in longest_first(requests):
                yield from by_context([(index, *self._fitted(*self._pair(*requests[index].args))) for index in indices])

        return self._all_scores(groups(), len(requests))

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_: Any) -> list[tuple[float, bool]]:
        """Return the same for requests as tokens, longest first."""
        pairs = [(at, *self._fitted(context, rest)) for at, (_, context, rest) in enumerate(requests)]
        groups = by_context(pairs)
        groups.sort(key=lambda row: len(row[0].context) + max(map(len, row[0].continuations)), reverse=True)
        return self._all_scores(iter(groups), len(requests))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in the harness's windows of the context's length."""
        totals = [0.0] * len(requests)

        def windows(index: int) -> Iterator[tuple[ContextGroup, list[tuple[int, bool]]]]:
            (text,) = requests[index].args
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            ahead = next(rolling, None)
            while ahead is not None:
                context, rest = make_disjoint_window(ahead)
                ahead = next(rolling, None)
                yield ContextGroup(context, [rest]), [(index, ahead is None)]

        groups = (window for indices in longest_first(requests) for index in indices for window in windows(index))
        with self._working(f"{len(requests)} texts") as progress:
            done = 0
            for (index, is_last), score in self._scores(groups):
                totals[index] += score.log_prob
                done += is_last
                progress(done, len(requests))
        return totals

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a context and of its continuation, as the harness divides them."""
        if context:
            before, after = self._encode_pair(context, continuation)
            return before, after or self.tok_encode(continuation, add_special_tokens=False)
        tokens = self.tok_encode(continuation, add_special_tokens=False)
        if tokens and tokens[0] == self.prefix_token_id:
            return tokens[:1], tokens[1:]
        return [self.prefix_token_id], tokens

    def _fitted(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        end = shortened(context, continuation, self.max_length, self.engine.has_encoder)
        self.shortened += len(end) < len(context)
        return end, continuation

    def _all_scores(self, groups: Iterator[tuple[ContextGroup, list[int]]], count: int) -> list[tuple[float, bool]]:
        answers = [(0.0, True)] * count
        with self._working(f"{count} continuations") as progress:
            for done, (index, score) in enumerate(self._scores(groups), 1):
                answers[index] = (score.log_prob, score.is_greedy)
                progress(done, count)
        return answers

    def _scores(self, groups: Iterable[tuple[ContextGroup, list[K]]]) -> Iterator[tuple[K, ContinuationScore]]:
        """Yield name and score of each continuation."""
        waiting = deque[list[K]]()

        def contexts() -> Iterator[ContextGroup]:
            for group, names in groups:
                waiting.append(names)
                yield group

        for scores in self.engine.scores(contexts()):
            yield from zip(waiting.popleft(), scores, strict=True)

    # -- answers -----------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each prompt, up to its stop texts. A prompt leaves room for the longest answer."""
        order = [index for indices in longest_first(requests) for index in indices]
        answers = [""] * len(requests)
        with self._working(f"{len(requests)} answers") as progress:
            answer_requests = (self._answer_request(index, *requests[index].args) for index in order)
            for done, (place, text) in enumerate(self.engine.answers(answer_requests), 1):
                answers[order[place]] = text
                progress(done, len(requests))
        return answers

    def _answer_request(self, index: int, prompt: str, settings: Mapping[str, Any]) -> AnswerRequest:
        """Return a request. Repeated requests with sampling have different seeds. Raises OptionError."""
        kwargs = normalize_gen_kwargs(dict(settings), DEFAULT_NEW_TOKENS)
        most, room = int(kwargs["max_gen_toks"]), self.max_length
        if not 0 < most < room:
            raise OptionError(
                f"a task asks for {most} new tokens, expected 1 to {room - 1} in a context of {room}",
                "raise `--context`, or ask for fewer: `--gen-kwargs max_gen_toks=N`",
            )
        stop, sampling = answer_settings(kwargs, self._seed + index)
        tokens = self.tok_encode(prompt) or [self.prefix_token_id]
        end = tokens[-(room if self.engine.has_encoder else room - most) :]
        self.shortened += len(end) < len(tokens)
        return AnswerRequest(end, most, stop, sampling)

    @contextmanager
    def _working(self, name: str) -> Iterator[Progress]:
        """Show progress. After an error, `is_working` stays True, so that it is known to come from the engine."""
        _ = self.engine
        self.is_working = True
        with self._progress(name) as progress:
            yield progress
        self.is_working = False
