"""Fuzz targets: a module for each parser of untrusted files.

Each has `target(data)`, which raises nothing but a fault of moec, and `seeds()`, well-formed inputs to start from.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

NAMES = (
    "manifest",
    "header",
    "archive",
    "trace",
    "popularity",
    "tuning",
    "profile",
    "device",
    "json_lines",
    "signature",
    "public_key",
)
LARGEST_BYTES = 1 << 16
"""Size of an input. Nothing in these parsers depends on more."""


class Target(Protocol):
    """A module of this package."""

    def target(self, data: bytes) -> None:
        """Parse, and check what was accepted."""

    def seeds(self) -> list[bytes]:
        """Inputs that are accepted."""


def load_target(name: str) -> Target:
    """Import one of NAMES."""
    return cast(Target, importlib.import_module(f"tests.fuzz.targets.{name}"))
