"""Check that each field of a dataclass of options has the declared type."""

from __future__ import annotations

import functools
import types
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moec.manifests.errors import OptionError

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
