"""Every option is defined once: docstring, checks and command line come from the fields of RuntimeOptions."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args, get_type_hints

import click
import pytest

from moec.cli.commands.running.run import run_command
from moec.cli.options.runtime_options import TUNED
from moec.manifests.errors import OptionError
from moec.runtime.options.runtime import RuntimeOptions
from moec.runtime.options.setting import settings_of

SETTINGS = settings_of(RuntimeOptions)
OPTIONS = [name for name, (_, shown) in SETTINGS.items() if shown.place == "option"]


def option(name: str) -> click.Option:
    (found,) = [param for param in run_command.params if isinstance(param, click.Option) and param.name == name]
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_the_command_line_shows_the_text_and_the_default(name: str) -> None:
    default, shown = SETTINGS[name]
    found = option(name)
    assert (found.help or "").startswith(shown.text)
    if default is not None:
        assert found.get_default(click.Context(run_command)) == default
    assert tuple(getattr(found.type, "choices", ())) == shown.choices


def test_the_docstring_holds_every_field_with_its_choices() -> None:
    text = " ".join((RuntimeOptions.__doc__ or "").split())
    for name, (_, shown) in SETTINGS.items():
        assert f"{name}: {shown.text}" in text
        for choice in shown.choices:
            assert f"`{choice}`" in text


def test_choices_are_those_of_the_types() -> None:
    hints = get_type_hints(RuntimeOptions)
    for name, (_, shown) in SETTINGS.items():
        literal = get_args(hints[name]) if shown.choices else ()
        assert literal == shown.choices, name


def outside(name: str) -> list[Any]:
    shown = SETTINGS[name][1]
    if shown.choices:
        return ["nothing"]
    if shown.bounds is None:
        return []
    least, most = shown.bounds
    return [least - 1] if most is None else [least - 1, most + 1]


@pytest.mark.parametrize(
    ("name", "value"), [(each.name, value) for each in fields(RuntimeOptions) for value in outside(each.name)]
)
def test_what_is_outside_is_refused_by_name(name: str, value: Any) -> None:
    values: dict[str, Any] = {name: value}
    with pytest.raises(OptionError) as caught:
        RuntimeOptions(**values)
    assert (SETTINGS[name][1].noun or name.replace("_", " ")) in str(caught.value) and str(value) in str(caught.value)


def test_tuned_options_change_no_result() -> None:
    assert TUNED == ("prefetch", "threads", "readers", "prefetch_layers", "prefetch_experts", "prefetch_rule")
