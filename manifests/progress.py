"""The callable that long work reports to."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Takes the steps that are done and the number of all steps."""
