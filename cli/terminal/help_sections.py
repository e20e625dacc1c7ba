"""Help texts with options in sections: the most used options first, then the others by subject."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

INTRODUCTIONS = {
    "Memory and cache": "Experts that were read stay in memory, in the expert cache, as long as they fit.",
    "Reading ahead": "While a layer computes, experts of later layers are read from storage. This changes no result.",
    "Lossy modes": "Lossy modes change the answers, and most of them read fewer bytes of experts. Each is off unless "
    "it is set. A missed expert is one that a token needs and that is not in memory. What the modes cost is told in "
    "docs/guides/choose-lossy-modes.md.",
}
"""Section -> a text before its options."""
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
                if name in INTRODUCTIONS:
                    formatter.write_text(INTRODUCTIONS[name])
                    formatter.write_paragraph()
                formatter.write_dl(records)


def section_option(section: str) -> Callable[..., Callable[[F], F]]:
    """Return `click.option` for the options of one section."""

    def option(*names: str, **values: Any) -> Callable[[F], F]:
        return click.option(*names, cls=SectionOption, section=section, **values)

    return option
