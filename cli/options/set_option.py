"""`--set NAME=VALUE`: the options that only comparisons and unusual machines need. `moec settings` lists them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import click

from moec.runtime.options.runtime import RuntimeOptions
from moec.runtime.options.setting import Setting, settings_of

from ..terminal.help_sections import SectionOption

F = TypeVar("F", bound=Callable[..., Any])
Table = Mapping[str, tuple[Any, Setting]]
"""Name of each setting -> default and definition."""
_KERNELS = Setting("Instruction set, like `scalar` or `numpy`.", metavar="NAME", default_text="the best one")
RUN_SETTINGS: Table = {
    **{name: entry for name, entry in settings_of(RuntimeOptions).items() if entry[1].place == "set"},
    "kernels": (None, _KERNELS),
}
COMPILE_SETTINGS: Table = {
    "path_keys": (
        "best",
        Setting(
            "Keys of the tables of `prefetch=path`. `best`: exact sets of experts, as EdgeMoE, where they predict "
            "held-out tokens better than pairs do. A bundle with sets has format 2, which older readers refuse.",
            choices=("pairs", "best"),
        ),
    )
}
_SWITCHES = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
_FORMER_MODES = ("dynamic-precision", "big-little", "cache-routing", "expert-activations")
_FORMER = {
    **{f"--{name}": f"`--lossy '{name} ...'`" for name in _FORMER_MODES},
    "--mode-loss": "`--lossy 'auto 1%'`",
    "--no-verify": "`--set verify=no`",
    "--no-learned-routers": "`--set learned-routers=no`",
}
"""Spelling of earlier versions -> the present one."""


class SetOption(SectionOption):
    """The option `--set`, with the table of its names."""

    def __init__(self, *names: Any, table: Table, **values: Any) -> None:
        super().__init__(*names, **values)
        self.table = table


def set_option(table: Table) -> Callable[[F], F]:
    """Return the option `--set`. Its names become values of the command, as if each were an option of its own."""

    def apply(ctx: click.Context, parameter: click.Parameter, texts: Sequence[str]) -> None:
        for name, (default, _) in table.items():
            ctx.params.setdefault(name, default)
        for text in texts:
            name, value = parse_setting(table, text)
            ctx.params[name] = value
            ctx.set_parameter_source(name, click.core.ParameterSource.COMMANDLINE)

    name, (default, _) = next(iter(table.items()))
    example = f"{spelled(name)}={default or 'lru'}"
    return click.option(
        "--set",
        cls=SetOption,
        table=table,
        multiple=True,
        expose_value=False,
        callback=apply,
        metavar="NAME=VALUE",
        help=f"Set what `moec settings` lists, like `{example}`; repeatable.",
    )


def parse_setting(table: Table, text: str) -> tuple[str, Any]:
    """Return field and value of `NAME=VALUE`. Raises click.BadParameter."""
    shown_name, sign, value = text.partition("=")
    name = shown_name.strip().replace("-", "_")
    if not sign or name not in table:
        near = get_close_matches(name[:40], table, n=2) or ["policy" if "policy" in table else next(iter(table))]
        like = " or ".join(f"`{spelled(close)}=VALUE`" for close in near)
        raise click.BadParameter(f"`{text[:60]}` sets nothing: write {like}; `moec settings` lists all names.")
    (default, setting), value = table[name], value.strip()
    if isinstance(default, bool):
        if value in _SWITCHES:
            return name, _SWITCHES[value]
        expected = "`yes` or `no`"
    elif setting.bounds is not None:
        if value.isdecimal() and len(value) <= 9:
            return name, int(value)
        expected = f"a whole number, {setting.range_text}"
    elif not setting.choices or value in setting.choices:
        return name, value
    else:
        expected = f"one of {', '.join(setting.choices)}"
    raise click.BadParameter(f"`{text[:60]}`: expected {expected}.")


def spelled(name: str) -> str:
    """Return the name of a field as on a command line."""
    return name.replace("_", "-")


def as_arguments(settings: Mapping[str, Any]) -> str:
    """Return options of a run or a compile, by field, as on a command line."""
    words = []
    for name, value in settings.items():
        text = ("no", "yes")[value] if isinstance(value, bool) else value
        is_setting = name in RUN_SETTINGS or name in COMPILE_SETTINGS
        words.append(f"--set {spelled(name)}={text}" if is_setting else f"--{spelled(name)} {shlex.quote(str(text))}")
    return " ".join(words)


def present_spelling(option: str) -> str | None:
    """Return how an option of earlier versions is written now; None for an option that never was."""
    name = option.removeprefix("--").replace("-", "_")
    if name in RUN_SETTINGS or name in COMPILE_SETTINGS:
        return f"`--set {spelled(name)}=VALUE`"
    return _FORMER.get(option)
