"""Interrupts of programs that tests start."""

from __future__ import annotations

import signal


def hear_interrupts() -> None:
    """Let a child process hear SIGINT. A shell starts jobs in the background, tests among them, with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
