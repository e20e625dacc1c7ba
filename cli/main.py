"""The console script. It loads little before it can handle an interrupt.

The commands are in `group.py`, the exit codes in `exit_codes.py`.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys

TYPE_CHECKING = False  # importing `typing` takes time
if TYPE_CHECKING:
    from typing import Any

    from .group import cli, version

__all__ = ["cli", "main", "version"]
_INTERRUPTED = 130


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import group

        return getattr(group, name)
    raise AttributeError(f"module `moec.cli.main` has no attribute `{name}`")


def main() -> None:
    """Run the command line and exit with its code. An interrupt at any time exits with 130."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a background job ignores it
    if is_heard:
        signal.signal(signal.SIGINT, _leave)
        # Registered first, so it runs last. After it the default is restored, and an interrupt kills the process.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    _hold_closed_streams()
    _settle_encodings()
    # Threads that spin while they wait slow each other down if another process runs. On a busy machine with two
    # cores 400 items took 247 s with the default and 19 s without. Must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    heed_quota()
    from .group import cli, hide_foreign_warnings

    hide_foreign_warnings()
    try:
        if is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        cli.main(prog_name="moec")
    except KeyboardInterrupt:  # outside the command, so there is nothing to clean up
        _leave()
    except SystemExit as leaving:
        if leaving.code == _INTERRUPTED:
            _end_interrupted()
        raise
    finally:
        if is_heard:
            signal.signal(signal.SIGINT, _leave)


def heed_quota() -> None:
    """Let torch and other libraries start no more threads than a quota of processor time pays for."""
    from moec.profiles.control_group import processor_quota

    if processor_quota() < (os.cpu_count() or 1):
        from moec.profiles.probe import available_threads  # most machines have no quota, and need no import

        os.environ.setdefault("OMP_NUM_THREADS", str(available_threads()))


def _leave(*_: object) -> None:
    """Exit at once. Before a command begins and after it ends there is nothing to clean up."""
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(_INTERRUPTED)


def _end_interrupted() -> None:
    """Exit after a command that was interrupted and has printed that.

    If the interrupt came during an `exec`, the interpreter's own exit would end the process with the signal.
    """
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:
        os._exit(_INTERRUPTED)


def _hold_closed_streams() -> None:
    """Open /dev/null for closed standard streams, so that no other file gets their numbers. Their use still fails."""
    for number, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            os.fstat(number)
        except OSError:
            try:
                os.open(os.devnull, flags)
            except OSError:
                return


def _settle_encodings() -> None:
    """Escape characters that the encoding of stdout lacks. Keep bytes of stdin that are not UTF-8 as surrogates."""
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    else:
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
