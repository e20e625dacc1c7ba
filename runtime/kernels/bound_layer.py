"""Bind the weights of an attention layer to the extension."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .stream_layer import StreamLayer


def bind(layer: StreamLayer, extension: ModuleType | None) -> Any:
    """Return the extension's object for this layer, from the class of the same name; None without an extension.

    Raises ValueError if shapes do not fit each other.
    """
    if extension is None:
        return None
    fields = {name: _native(value) for name, value in vars(layer).items()}
    fields["norm"] = (fields["norm"], fields.pop("norm_bias"))
    return getattr(extension, type(layer).__name__)(**fields)


def _native(value: Any) -> Any:
    """Replace matrices, alone or in a tuple, by the extension's objects. Other values stay."""
    return tuple(_native(item) for item in value) if isinstance(value, tuple) else getattr(value, "native", value)
