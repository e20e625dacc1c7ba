"""Help texts with options in sections: the most used options first, then the others by subject."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class SectionOption(click.Option):
    """An option with the name of its section in the help text. An empty name is the first section."""

    def __init__(self, *names: Any, section: str = "", **values: Any) -> None:
        super().__init__(*names, **values)
        self.section = section


class SectionCommand(click.Command):
    """A command whose help text has a section for each subject."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections in the order in which their first options were declared, the unnamed one first."""
        sections: dict[str, list[tuple[str, str]]] = {"": []}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(option, "section", ""), []).append(record)
        for name, records in sections.items():
            with formatter.section(name or "Options"):
                formatter.write_dl(records)


def section_option(section: str) -> Callable[..., Callable[[F], F]]:
    """Return `click.option` for the options of one section."""

    def option(*names: str, **values: Any) -> Callable[[F], F]:
        return click.option(*names, cls=SectionOption, section=section, **values)

    return option
