"""Layers of attention as the extension has them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .stream_layer import StreamLayer


def bind(layer: StreamLayer, extension: ModuleType | None) -> Any:
    """The class of the extension that has this one's name, made of its fields; None without an extension.

    Raises ValueError where shapes do not fit each other.
    """
    if extension is None:
        return None
    fields = {name: _native(value) for name, value in vars(layer).items()}
    fields["norm"] = (fields["norm"], fields.pop("norm_bias"))
    return getattr(extension, type(layer).__name__)(**fields)


def _native(value: Any) -> Any:
    """A matrix as the extension has it, alone or in a tuple; the rest as it is."""
    return tuple(_native(each) for each in value) if isinstance(value, tuple) else getattr(value, "native", value)
