"""Options of sampling, common to `run` and `chat`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..terminal.help_sections import add_options, section_option

if TYPE_CHECKING:
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.text.sampling import SamplingOptions

F = TypeVar("F", bound=Callable[..., Any])
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_IN_CHAT = "in chat as the bundle recommends"
_STOP = section_option("Generation")("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
_OPTIONS: tuple[tuple[str, str, float, str, str], ...] = (
    ("--temperature", "", 0.0, "X", "Draw tokens, the higher the more varied. 0 takes the likeliest token.  "
     f"[default: 0; {_IN_CHAT}, else 1]"),
    ("--top-k", "Generation", 0, "N", f"Draw from the N most probable tokens.  [default: all; {_IN_CHAT}]"),
    ("--top-p", "Generation", 1.0, "P", f"Draw from the most probable tokens that sum to P.  [default: 1; {_IN_CHAT}]"),
    ("--min-p", "Generation", 0.0, "P", f"Leave out tokens below P times the highest.  [default: 0; {_IN_CHAT}]"),
    ("--repetition-penalty", "Generation", 1.0, "X",
     f"Above 1: lower scores of tokens in the text.  [default: 1; {_IN_CHAT}]"),
    ("--seed", "", 0, "N", "Seed of the drawn tokens.  [default: 0; in chat drawn]"),
)  # fmt: skip
"""Name, section, neutral value, metavar and help text."""
_DRAWN_SEED_BITS = 31


def _options(*, has_values: bool) -> list[Callable[[F], F]]:
    """Return the options. has_values: whether an absent option has its neutral value."""
    options: list[Callable[[F], F]] = []
    for name, section, neutral, metavar, text in _OPTIONS:
        default = neutral if has_values else None
        option = section_option(section)(name, type=type(neutral), metavar=metavar, help=text, default=default)
        options.append(option)
    return [*options[:-1], _STOP, options[-1]]


def sampling_options(command: F) -> F:
    """Add the options to a command: the fields of SamplingOptions, and `stop`. Without them a run is greedy."""
    return add_options(command, _options(has_values=True))


def recommended_sampling_options(command: F) -> F:
    """Add the options to a command. Absent ones are None, for `chosen_sampling`."""
    return add_options(command, _options(has_values=False))


def chosen_sampling(bundle: Bundle, verify: bool, values: Mapping[str, Any]) -> tuple[SamplingOptions, str]:
    """Return the sampling of an opened bundle with the options that were given, and a line that says it.

    verify: whether to compare the bundle's file with its digest.
    values: values of `recommended_sampling_options`; empty for none. Without a seed one is drawn.
    Raises OptionError, and the errors of `recommended_sampling`.
    """
    from moec.runtime.text.generation_defaults import (
        GENERATION_NAME,
        PLAIN,
        recommended_sampling,
        sampling_text,
        with_given,
    )

    recommended = recommended_sampling(bundle, verify)
    given = {name: values[name] for name in NAMES if values.get(name) is not None}
    chosen = with_given(recommended or PLAIN, given)
    seed = values.get("seed")
    if seed is None:
        seed = secrets.randbits(_DRAWN_SEED_BITS)
    source = f"{GENERATION_NAME} of the bundle" if recommended is not None else "default"
    said = f"sampling{'' if given else f' by {source}'}: {sampling_text(chosen)}"
    said += f"; seed {seed}" if chosen.temperature and "seed" in values else ""
    return replace(chosen, seed=seed), said
