"""Interrupts of the user, as exceptions."""

from __future__ import annotations


def is_interrupt(problem: BaseException) -> bool:
    """Return whether an interrupt is the cause. An extension interrupted while it loads raises another error."""
    seen: BaseException | None = problem
    while seen is not None:
        if isinstance(seen, KeyboardInterrupt):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
