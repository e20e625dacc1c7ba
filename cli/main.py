"""The console script. What it loads before it can handle an interrupt is the least there is; the commands: group.py."""

from __future__ import annotations

import atexit
import os
import signal
import sys

TYPE_CHECKING = False  # `typing` would be loaded for this name alone
if TYPE_CHECKING:
    from typing import Any

    from .group import EXIT_FAULT, EXIT_INTERRUPTED, cli, version

__all__ = ["EXIT_FAULT", "EXIT_INTERRUPTED", "cli", "main", "version"]
_INTERRUPTED = 130


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import group

        return getattr(group, name)
    raise AttributeError(f"module `moec.cli.main` has no attribute `{name}`")


def main() -> None:
    """Run the command line and leave with its exit code. An interrupt at any time leaves with 130."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a job in the background hears none
    if is_heard:
        signal.signal(signal.SIGINT, _leave)
        # Registered first, so it runs last. What follows restores the default, by which an interrupt kills the process.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    _hold_closed_streams()
    _settle_encodings()
    # Threads that spin while they wait starve each other as soon as anything else runs: on a busy machine with two
    # cores 400 items took 247 s with the default and 19 s without. Must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    from .group import cli
    from .terminal.foreign_warnings import hide_foreign_warnings

    hide_foreign_warnings()
    try:
        if is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        cli.main(prog_name="moec")
    except KeyboardInterrupt:  # around the command, where nothing of it is left to clean up
        _leave()
    except SystemExit as leaving:
        if leaving.code == _INTERRUPTED:
            _end_interrupted()
        raise
    finally:
        if is_heard:
            signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> None:
    """Leave at once: before a command has begun, or after it has ended, nothing is left to clean up."""
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(_INTERRUPTED)


def _end_interrupted() -> None:
    """Leave after a command that was interrupted, and has said so.

    The interpreter's own end would kill the process by the signal where the interrupt came in the middle of an `exec`.
    """
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:
        os._exit(_INTERRUPTED)


def _hold_closed_streams() -> None:
    """Take the numbers of standard streams that are closed, so that no file of ours gets one. Their use still fails."""
    for number, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            os.fstat(number)
        except OSError:
            try:
                os.open(os.devnull, flags)
            except OSError:
                return


def _settle_encodings() -> None:
    """Show a character that stdout's encoding lacks escaped, and leave it to the reader of stdin what is no text."""
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    else:
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
