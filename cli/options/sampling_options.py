"""Options of sampling, common to `run` and `chat`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..terminal.help_sections import section_option

if TYPE_CHECKING:
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.text.sampling import SamplingOptions

F = TypeVar("F", bound=Callable[..., Any])
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_generation = section_option("Generation")
_DRAWN_SEED_BITS = 31


def _options(*, has_values: bool) -> tuple[Callable[[F], F], ...]:
    """Return the options. has_values: whether an absent option has its neutral value."""

    def default(value: float) -> dict[str, Any]:
        return {"default": value if has_values else None}

    return (
        click.option(
            "--temperature",
            type=float,
            metavar="X",
            help="Draw tokens, the higher the more varied. 0 takes the likeliest token.  "
            "[default: 0; in chat as the bundle recommends, else 1]",
            **default(0.0),
        ),
        _generation(
            "--top-k",
            type=int,
            metavar="N",
            help="Draw from the N most probable tokens.  [default: all; in chat as the bundle recommends]",
            **default(0),
        ),
        _generation(
            "--top-p",
            type=float,
            metavar="P",
            help="Draw from the most probable tokens that sum to P.  [default: 1; in chat as the bundle recommends]",
            **default(1.0),
        ),
        _generation(
            "--min-p",
            type=float,
            metavar="P",
            help="Leave out tokens below P times the highest.  [default: 0; in chat as the bundle recommends]",
            **default(0.0),
        ),
        _generation(
            "--repetition-penalty",
            type=float,
            metavar="X",
            help="Above 1: lower scores of tokens in the text.  [default: 1; in chat as the bundle recommends]",
            **default(1.0),
        ),
        _generation("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable."),
        click.option(
            "--seed", type=int, metavar="N", help="Seed of the drawn tokens.  [default: 0; in chat drawn]", **default(0)
        ),
    )


def sampling_options(command: F) -> F:
    """Add the options to a command: the fields of SamplingOptions, and `stop`. Without them a run is greedy."""
    return _with(command, _options(has_values=True))


def recommended_sampling_options(command: F) -> F:
    """Add the options to a command. Absent ones are None, for `chosen_sampling`."""
    return _with(command, _options(has_values=False))


def _with(command: F, options: tuple[Callable[[F], F], ...]) -> F:
    for option in reversed(options):
        command = option(command)
    return command


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
