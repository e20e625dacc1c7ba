"""Events of a simulated pass, for a picture of one token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EventKind = Literal["dense", "experts", "shared", "head", "wait", "read", "ahead"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that takes simulated time.

    kind: `read` brings an expert that a layer waits for, `ahead` one that is read ahead.
    begin_ns, end_ns: simulated times.
    layer: layer that computes or waits, or whose expert is read; None for the head.
    """

    kind: EventKind
    begin_ns: int
    end_ns: int
    layer: int | None


Watch = Callable[[Event], None]
"""Receives every event, in the order of its begin or end."""
