"""Interrupts of the user and of the system, as exceptions."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command as an interrupt does, so that it leaves nothing."""
_REPEAT_S = 0.05
_IMPORTER = "<frozen importlib._bootstrap>"
_received: list[int] = []


def end_by_signals() -> None:
    """Let the signals that end a process interrupt it. A signal that is ignored, or has a handler, stays as it is."""
    if threading.current_thread() is not threading.main_thread():
        return
    _received.clear()
    for number in (signal.SIGINT, *ENDING):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, _interrupt)


def ending_signal() -> int:
    """Return the signal that ended the command: SIGINT if no other came."""
    return _received[0] if _received else signal.SIGINT


def end_repeats() -> bool:
    """Interrupt no more: the command has ended. Return whether an interrupt came while a module was imported."""
    if signal.getsignal(signal.SIGALRM) is not _repeat:
        return False
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return True


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt. Code that runs while a module is imported may drop it, so it is raised again then."""
    _received.append(number)
    if _is_importing(frame) and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        signal.signal(signal.SIGALRM, _repeat)
        signal.setitimer(signal.ITIMER_REAL, _REPEAT_S, _REPEAT_S)
    raise KeyboardInterrupt


def _repeat(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, unless the command is handling it."""
    problem = sys.exc_info()[1]
    if problem is None or not is_interrupt(problem):
        raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame or one of its callers imports a module."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTER:
            return True
        frame = frame.f_back
    return False


def is_interrupt(problem: BaseException) -> bool:
    """Return whether an interrupt is the cause. An extension interrupted while it loads raises another error."""
    seen: BaseException | None = problem
    while seen is not None:
        if isinstance(seen, KeyboardInterrupt):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
