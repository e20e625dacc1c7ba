"""Exit codes of `moec`, which `docs/cli.md` lists, and the message of each error."""

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
