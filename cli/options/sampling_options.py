"""Options of sampling, common to `run` and `chat`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..terminal.help_sections import section_option

F = TypeVar("F", bound=Callable[..., Any])
_generation = section_option("Generation")
_OPTIONS = (
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
    _generation(
        "--top-k", type=int, default=0, metavar="N", help="Sample from the N most probable tokens.  [default: all]"
    ),
    _generation(
        "--top-p", type=float, default=1.0, metavar="P", help="Sample from the most probable tokens that sum to P."
    ),
    _generation("--min-p", type=float, default=0.0, metavar="P", help="Leave out tokens below P times the highest."),
    _generation(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="Above 1: lower scores of tokens in the text.",
    ),
    _generation("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable."),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sampling."),
)


def sampling_options(command: F) -> F:
    """Add the options to a command: the fields of SamplingOptions, and `stop`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
