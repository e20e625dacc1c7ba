"""Interface of lm-evaluation-harness's model to an engine: tokens in, scores and texts out."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from moec.manifests.errors import ContextOverflow, OptionError

_SAMPLING = ("top_p", "top_k", "min_p")
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_NO_EFFECT = {"num_beams": 1, "do_sample": None, "temperature": None, "until": None, "max_gen_toks": None}
"""Settings that are read elsewhere, or that have no effect at this value. None: any value."""

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """Continuations of one context, as token ids. A context has at least one token."""

    context: Sequence[int]
    continuations: Sequence[Sequence[int]]


class ContinuationScore(Protocol):
    """The score of one continuation."""

    @property
    def log_prob(self) -> float:
        """Sum of log p over its tokens, in nats."""
        ...

    @property
    def is_greedy(self) -> bool:
        """True if greedy decoding gives these tokens."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """One text to continue.

    tokens: the prompt.
    stop: texts that end the answer. They are not part of it.
    sampling: settings of the sampler that are not greedy decoding's, by name, such as `temperature`.
    """

    tokens: Sequence[int]
    max_new_tokens: int
    stop: tuple[str, ...]
    sampling: Mapping[str, float] = field(default_factory=dict)


class HarnessEngine(Protocol):
    """A model that scores and continues tokens, many at once."""

    @property
    def context(self) -> int:
        """Most positions of a sequence."""
        ...

    @property
    def has_encoder(self) -> bool:
        """True if an encoder reads the prompt."""
        ...

    @property
    def start_token(self) -> int | None:
        """The token that begins a text; None if the model has none."""
        ...

    @property
    def end_token(self) -> int:
        """The first token that ends a text."""
        ...

    def encode(self, text: str, adds_special_tokens: bool) -> list[int]:
        """Return the tokens of a text. Raises ContextOverflow for one that is too long to encode."""
        ...

    def scores(self, groups: Iterable[ContextGroup], /) -> Iterator[Sequence[ContinuationScore]]:
        """Yield the scores of each group, in their order. Groups are read as they are needed."""
        ...

    def answers(self, requests: Iterable[AnswerRequest], /) -> Iterator[tuple[int, str]]:
        """Yield index and text of each answer, as they end. Requests are read as they are needed."""
        ...


def longest_first(requests: Sequence[Any]) -> list[list[int]]:
    """Return the indices of requests. Those with one context stand together.

    The requests of a task follow each other, because their contexts often share a beginning. The task with the longest
    request comes first, and in a task the longest request, so that an estimate of the time falls.
    requests: instances of the harness. Their first argument is the context.
    """
    groups: dict[tuple[str, Hashable], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault((_task(request), request.args[0]), []).append(index)
    sizes = {key: max(_size(requests[index].args) for index in indices) for key, indices in groups.items()}
    longest: dict[str, int] = {}
    for (task, _), size in sizes.items():
        longest[task] = max(size, longest.get(task, 0))
    ordered = sorted(groups, key=lambda key: (-longest[key[0]], key[0], -sizes[key]))
    return [groups[key] for key in ordered]


def _task(request: Any) -> str:
    return str(getattr(request, "task_name", None) or "")


def _size(arguments: Sequence[Any]) -> int:
    return sum(len(argument) for argument in arguments if isinstance(argument, str))


def by_context(pairs: Iterable[tuple[K, Sequence[int], Sequence[int]]]) -> list[tuple[ContextGroup, list[K]]]:
    """Return groups of pairs with equal contexts, with the names of their continuations.

    pairs: name, context and continuation of each.
    """
    groups: dict[tuple[int, ...], tuple[list[Sequence[int]], list[K]]] = {}
    for name, context, continuation in pairs:
        continuations, names = groups.setdefault(tuple(context), ([], []))
        continuations.append(continuation)
        names.append(name)
    return [(ContextGroup(context, continuations), names) for context, (continuations, names) in groups.items()]


def shortened(context: Sequence[int], continuation: Sequence[int], most: int, has_encoder: bool) -> Sequence[int]:
    """Return the end of a context that fits next to its continuation. The harness's own models cut in this way.

    most: positions of a sequence. The last token needs none, because it predicts nothing.
    has_encoder: whether the context has positions of its own.
    Raises ContextOverflow for a continuation that is too long.
    """
    if len(continuation) > most:
        raise ContextOverflow(
            f"a continuation has {len(continuation)} tokens, the context holds {most}", "raise `--context`"
        )
    room = most if has_encoder else most - len(continuation) + 1
    return context[-room:] if len(context) > room else context


def answer_settings(kwargs: Mapping[str, Any], seed: int) -> tuple[tuple[str, ...], dict[str, float]]:
    """Return the stop texts of a request, and the settings of its sampler.

    kwargs: generation settings in the harness's normal form.
    Raises OptionError for a setting that would change the answer and that there is not.
    """
    stop = tuple(dict.fromkeys(str(text) for text in kwargs["until"] if text))
    sampling: dict[str, float] = {}
    for name, neutral in _PENALTIES.items():
        value = kwargs.get(name)
        if value is not None and float(value) != neutral:
            sampling[name] = float(value)
    temperature = float(kwargs.get("temperature") or 0.0)
    if kwargs.get("do_sample") is not False and temperature > 0:
        sampling |= {"temperature": temperature, "seed": int(kwargs.get("seed") or seed)}
        for name in _SAMPLING:
            value = kwargs.get(name)
            if value is not None and float(value) > 0:  # -1 and 0 are other engines' signs for all tokens
                sampling[name] = int(value) if name == "top_k" else float(value)
    _refuse_others(kwargs)
    return stop, sampling


def _refuse_others(kwargs: Mapping[str, Any]) -> None:
    for name, value in kwargs.items():
        known = name in (*_SAMPLING, *_PENALTIES, "seed") or (name in _NO_EFFECT and _NO_EFFECT[name] in (None, value))
        if not known and value not in (None, False):
            raise OptionError(
                f"a task asks for the generation setting `{name}: {value}`, which moec does not have",
                "change the task, or override it with `--gen-kwargs`",
            )
