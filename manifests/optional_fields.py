"""Fields that the manifest leaves out as long as they have their default.

What few models have is no field of all the others, and bundles written before such a field existed keep their bytes.
A manifest that holds the default all the same is refused: equal bundles have equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from typing import Any

OPTIONAL: Mapping[str, bool] = {"left out at its default": True}
"""Metadata of such a field: `field(default=None, metadata=OPTIONAL)`."""


def is_optional(declared: Field[Any]) -> bool:
    """Whether the manifest may lack the field."""
    return all(declared.metadata.get(key) == value for key, value in OPTIONAL.items())


def is_left_out(declared: Field[Any], value: Any) -> bool:
    """Whether the manifest must lack the field."""
    return is_optional(declared) and bool(value == declared.default)
