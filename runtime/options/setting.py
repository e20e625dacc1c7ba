"""One definition of each option: its default, help text, choices and bounds, kept as metadata of a dataclass field.

The command line, the reference of commands, `moec tune` and the docstring of the dataclass are made from it.
"""

from __future__ import annotations

import functools
import textwrap
import types
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moec.manifests.errors import OptionError

Group = Literal["common", "memory and cache", "reading ahead", "lossy modes", "accelerator", "machine"]
Place = Literal["option", "set", "internal"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Texts and checks of an option.

    text: one or two sentences for help texts and the docstring.
    group: section of a help text.
    noun: name in error messages; empty: the field's name in words.

    metavar: placeholder of its value.
    choices: possible values; empty: not a choice.
    bounds: least whole number, and largest one or None; None: not a number.

    default_text: description of the default; empty: the value itself.
    is_tuned: whether `moec tune` measures it.
    place: how commands take it: as an option of its own, as a name of `--set`, or not at all.
    """

    text: str
    group: Group = "machine"
    noun: str = ""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    bounds: tuple[int, int | None] | None = None
    default_text: str = ""
    is_tuned: bool = False
    place: Place = "option"

    def check(self, name: str, value: Any) -> None:
        """Check choices and bounds. Raises OptionError."""
        noun = self.noun or name.replace("_", " ")
        if self.choices and value not in self.choices:
            raise OptionError(f"unknown {noun} `{value}`", f"choose one of {', '.join(self.choices)}")
        if self.bounds is not None:
            least, most = self.bounds
            if value < least or (most is not None and value > most):
                raise OptionError(f"{noun} must be {self.range_text}, found {value}", "leave it out for the default")

    @property
    def range_text(self) -> str:
        """Bounds in words."""
        least, most = self.bounds or (None, None)
        return f"{least} or more" if most is None else f"{least} to {most}"


def setting(default: Any, text: str, **values: Any) -> Any:
    """Declare a field of options. values: fields of Setting."""
    return field(default=default, metadata={"setting": Setting(text, **values)})


def settings_of(kind: Any) -> dict[str, tuple[Any, Setting]]:
    """Return the default and the Setting of each field of a dataclass of options."""
    return {each.name: (each.default, each.metadata["setting"]) for each in fields(kind)}


def check_settings(options: Any) -> None:
    """Check the fields of an instance, one after the other. Raises OptionError."""
    for name, (_, each) in settings_of(type(options)).items():
        each.check(name, getattr(options, name))


def docstring_of(kind: Any, head: str) -> str:
    """Return a docstring: the head, then each field with its text, choices, bounds and default."""
    lines = [head, ""]
    for name, (default, each) in settings_of(kind).items():
        choices = f" One of {', '.join(f'`{choice}`' for choice in each.choices)}." if each.choices else ""
        bounds = f" {each.range_text}." if each.bounds else ""
        shown = f" Default: {each.default_text or repr(default)}."
        text = f"{name}: {each.text}{choices}{bounds}{shown}"
        lines += textwrap.wrap(text, 116, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines) + "\n"


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    type(None): "None",
    tuple: "a tuple",
}


def check_field_types(options: Any) -> None:
    """Check the type of each field. True is not a number, 1.0 is not a whole number, and 1 is a number.

    Values within a type are not checked.
    options: an instance of a dataclass whose fields are int, float, bool, str, tuple, a Literal of texts, or a union of
        them. What a tuple holds is not checked.
    Raises OptionError with the name of the field.
    """
    kind: Any = type(options)
    for name, allowed in _declared(kind):
        value = getattr(options, name)
        if type(value) not in allowed:
            expected = " or ".join(_WORDS[kind] for kind in allowed if kind is not int or float not in allowed)
            remedy = f"see `help({kind.__module__}.{kind.__qualname__})`"
            raise OptionError(f"the option `{name}` must be {expected}, found {_shown(value)}", remedy)


@functools.cache
def _declared(kind: Any) -> tuple[tuple[str, tuple[type, ...]], ...]:
    """Return the allowed types of each field."""
    hints = get_type_hints(kind)
    return tuple((field.name, tuple(dict.fromkeys(_allowed(hints[field.name])))) for field in fields(kind))


def _allowed(hint: Any) -> tuple[type, ...]:
    if get_origin(hint) is Literal:
        return tuple(type(value) for value in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(kind for part in get_args(hint) for kind in _allowed(part))
    if get_origin(hint) is tuple:
        return (tuple,)
    return (float, int) if hint is float else (hint,)


def _shown(value: object) -> str:
    """Return a short text of a value for a message. No method of an unknown class is called."""
    if isinstance(value, str | int | float | list | tuple | dict | None):
        try:
            return repr(value)[:60]
        except (RecursionError, ValueError):  # nested too deeply; more digits than are written
            pass
    return f"a `{type(value).__name__}`"
