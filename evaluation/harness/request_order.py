"""The order of a harness's requests: tasks together, longest first, and continuations of one context together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from moec.manifests.errors import ContextOverflow, OptionError

from .engine import ContextGroup

_SAMPLING = ("top_p", "top_k", "min_p")
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_NO_EFFECT = {"num_beams": 1, "do_sample": None, "temperature": None, "until": None, "max_gen_toks": None}
"""Settings that are read elsewhere, or that have no effect at this value. None: any value."""

K = TypeVar("K", bound=Hashable)


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
    """Return the characters of a request."""
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
