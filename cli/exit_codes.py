"""Exit codes of `moec`, which `docs/cli.md` lists, the message of each error, and interrupts as exceptions."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import click

from moec.manifests.errors import ExecutionError, MissingDependency, MoecError

from .terminal import output

EXIT_ROLLED_BACK = 6
EXIT_FAULT = 70
_EXTRAS = {
    "torch": "compile",
    "transformers": "compile",
    "safetensors": "compile",
    "optimum": "compile",
    "huggingface_hub": "compile",
    "datasets": "eval",
    "evaluate": "eval",
    "rouge_score": "eval",
    "cryptography": "ship",
    "starlette": "serve",
    "uvicorn": "serve",
    "lm_eval": "lm-eval",
}
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command as an interrupt does, so that it leaves nothing."""
_REPEAT_S = 0.05
_IMPORTER = "<frozen importlib._bootstrap>"
_received: list[int] = []


def exit_code(run: Callable[[], Any]) -> int:
    """Run the command line, print its error if there is one, and return the exit code."""
    end_by_signals()
    try:
        code = run()
        return code if isinstance(code, int) else 0
    except click.Abort:
        return _interrupted()
    except click.ClickException as problem:
        shown = io.StringIO()
        problem.show(shown)
        output.say(shown.getvalue(), end="")
        return problem.exit_code
    except Exception as problem:
        was_importing = end_repeats()  # an import that drops an interrupt may fail by it later
        if was_importing or is_interrupt(problem):
            return _interrupted()
        error = _as_error(problem)
        if error is None:
            output.say(traceback.format_exc(), end="")
            output.say("this is a fault in moec: please report it with the lines above and the command you ran")
            return EXIT_FAULT
        output.error(error)
        return error.exit_code
    finally:
        end_repeats()
        output.settle()


def _as_error(problem: Exception) -> MoecError | None:
    """Return an exception as an error that the user can act on; None for a fault."""
    if isinstance(problem, MoecError):
        return problem
    if isinstance(problem, ModuleNotFoundError):
        package = (problem.name or "").partition(".")[0]
        needed = f"this command needs the package `{package}`, which is not installed"
        extra = _EXTRAS.get(package)
        return None if extra is None else MissingDependency(needed, f'pip install "moec[{extra}]"')
    if isinstance(problem, MemoryError):
        return ExecutionError("the memory of this process is used up", "give it more, or ask for less")
    if isinstance(problem, OSError):
        place = f"`{problem.filename}`: " if problem.filename is not None else ""
        return ExecutionError(f"{place}{problem.strerror or problem}", "check path and permissions")
    return None


def _interrupted() -> int:
    output.say("interrupted")
    return 128 + ending_signal()


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
