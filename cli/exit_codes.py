"""Exit codes of `moec`, and the message of each error.

Exit codes:
* 0: done.
* 1: an error that the user can act on, or a closed output.
* 2: wrong usage.
* 3: a damaged bundle, or one that no accepted key signed.
* 4: a channel without a bundle for this device.
* 5: a store that does not answer, or answers wrongly.
* 6: a pull of a sequence that was rolled back, so nothing was installed.
* 70: a fault in moec.
* 75: no space on the disk, or another process in the way: another try later may succeed.
* 129, 130, 143: interrupted by SIGHUP, SIGINT or SIGTERM.
"""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable
from typing import Any

import click

from moec.manifests.errors import ExecutionError, MissingDependency, MoecError

from .interrupts import end_by_signals, end_repeats, ending_signal, is_interrupt
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
        return _interrupted() if was_importing or is_interrupt(problem) else _told(problem)
    finally:
        end_repeats()
        output.settle()


def _told(problem: Exception) -> int:
    """Print the message of an exception, and return the exit code."""
    if isinstance(problem, MoecError):
        output.error(problem)
        return problem.exit_code
    if isinstance(problem, ModuleNotFoundError):
        return _missing_module(problem)
    if isinstance(problem, MemoryError):
        told: MoecError = ExecutionError("the memory of this process is used up", "give it more, or ask for less")
    elif isinstance(problem, OSError):
        place = f"`{problem.filename}`: " if problem.filename is not None else ""
        told = ExecutionError(f"{place}{problem.strerror or problem}", "check path and permissions")
    else:
        return _fault()
    output.error(told)
    return told.exit_code


def _interrupted() -> int:
    output.say("interrupted")
    return 128 + ending_signal()


def _missing_module(problem: ModuleNotFoundError) -> int:
    package = (problem.name or "").partition(".")[0]
    if package not in _EXTRAS:
        return _fault()
    missing = MissingDependency(
        f"this command needs the package `{package}`, which is not installed",
        f'pip install "moec[{_EXTRAS[package]}]"',
    )
    output.error(missing)
    return missing.exit_code


def _fault() -> int:
    output.say(traceback.format_exc(), end="")
    output.say("this is a fault in moec: please report it with the lines above and the command you ran")
    return EXIT_FAULT
