"""Interrupts of the user and of the system, as exceptions."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command as an interrupt does, so that it leaves nothing."""
_received: list[int] = []


def end_by_signals() -> None:
    """Let the signals that end a process interrupt it. A signal that is ignored, or has a handler, stays as it is."""
    if threading.current_thread() is not threading.main_thread():
        return
    _received.clear()
    for number in ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, _interrupt)


def ending_signal() -> int:
    """Return the signal that ended the command: SIGINT if no other came."""
    return _received[0] if _received else signal.SIGINT


def _interrupt(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    raise KeyboardInterrupt


def is_interrupt(problem: BaseException) -> bool:
    """Return whether an interrupt is the cause. An extension interrupted while it loads raises another error."""
    seen: BaseException | None = problem
    while seen is not None:
        if isinstance(seen, KeyboardInterrupt):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
