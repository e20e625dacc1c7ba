"""Fields that the manifest leaves out while they have their default.

So a field for few models does not appear in the manifests of others, and older bundles keep their bytes.
A manifest that contains the default is refused, because equal bundles must have equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from typing import Any

OPTIONAL: Mapping[str, bool] = {"left out at its default": True}
"""Metadata of such a field: `field(default=None, metadata=OPTIONAL)`."""


def is_optional(declared: Field[Any]) -> bool:
    """Return whether the manifest may lack the field."""
    return all(declared.metadata.get(key) == value for key, value in OPTIONAL.items())


def is_left_out(declared: Field[Any], value: Any) -> bool:
    """Return whether the manifest must lack the field."""
    return is_optional(declared) and bool(value == declared.default)
