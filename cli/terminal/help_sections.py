"""Help texts with options in sections: the most used options first, then the others by subject."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from . import output

INTRODUCTIONS = {
    "Memory and cache": "Experts that were read stay in memory, in the expert cache, as long as they fit.",
    "Reading ahead": "While a layer computes, experts of later layers are read from storage. This changes no result.",
    "Lossy modes": "A lossy mode changes the answers, and most of them read fewer bytes of experts. A missed expert "
    "is one that a token needs and that is not in memory. docs/guides/choose-lossy-modes.md tells costs.",
}
"""Section -> a text before its options."""
_SHOWS_ALL = "moec.help_all"
_HELP_ALL = "Show all options and exit."
F = TypeVar("F", bound=Callable[..., Any])


class SectionOption(click.Option):
    """An option with the name of its section in the help text. An empty name is the first section."""

    def __init__(self, *names: Any, section: str = "", **values: Any) -> None:
        super().__init__(*names, **values)
        self.section = section


class SectionCommand(click.Command):
    """A command whose help text has a section for each subject. `--help` shows the most used, `--help-all` all.

    shown: sections of `--help`.
    """

    def __init__(self, *arguments: Any, shown: tuple[str, ...] = ("",), **values: Any) -> None:
        super().__init__(*arguments, **values)
        self._shown = shown
        self.params.append(
            click.Option(
                ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_print_all, help=_HELP_ALL
            )
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections in the order in which their first options were declared, the unnamed one first."""
        sections: dict[str, list[tuple[str, str]]] = {"": []}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(option, "section", ""), []).append(record)
        shows_all = ctx.meta.get(_SHOWS_ALL, False)
        for name, records in sections.items():
            if name not in self._shown and not shows_all:
                continue
            with formatter.section(name or "Options"):
                if name in INTRODUCTIONS:
                    formatter.write_text(INTRODUCTIONS[name])
                    formatter.write_paragraph()
                formatter.write_dl(records)
        hidden = [name for name in sections if name not in self._shown]
        if hidden and not shows_all:
            formatter.write_paragraph()
            formatter.write_text(f"More with --help-all: {', '.join(hidden).lower()}.")


def _print_all(ctx: click.Context, parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        ctx.meta[_SHOWS_ALL] = True
        output.data(ctx.get_help())
        ctx.exit()


def add_options(command: F, options: Iterable[Callable[[F], F]]) -> F:
    """Add options to a command, so that its help text shows them in this order."""
    for option in reversed(list(options)):
        command = option(command)
    return command


def section_option(section: str) -> Callable[..., Callable[[F], F]]:
    """Return `click.option` for the options of one section."""

    def option(*names: str, **values: Any) -> Callable[[F], F]:
        return click.option(*names, cls=SectionOption, section=section, **values)

    return option
