"""Readers of experts: how many, and what each of them reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Takes = Literal["any", "demand", "advice"]
"""Queues that a reader takes from: demand before advice, demand alone, advice alone."""


@dataclass(frozen=True, slots=True)
class Readers:
    """Number and duties of reader threads.

    count: readers of demand.
    cpus: None: the readers of demand read advice as well. Else advice has a reader of its own with low priority, which
        runs on these processors; empty: on any.
    """

    count: int = 1
    cpus: tuple[int, ...] | None = None

    @property
    def most_queued(self) -> int:
        """Reads ahead that are queued at once; 0: all that fit.

        A read evicts when it is queued. A reader of its own is advised about a whole layer, and most of it is not read.
        """
        return 0 if self.cpus is None else 1

    @property
    def takes(self) -> list[Takes]:
        """Queues of each reader."""
        if self.cpus is None:
            return ["any"] * self.count
        return [*["demand"] * self.count, "advice"]  # type: ignore[list-item]


ONE_READER = Readers()
