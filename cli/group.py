"""`moec`: the group of commands, loaded on demand. All errors become messages and exit codes here.

Exit codes:
- 0: done.
- 1: an error that the user can act on, or a closed output.
- 2: wrong usage.
- 3: a damaged bundle.
- 70: a fault in moec.
- 130: interrupted.
"""

from __future__ import annotations

import importlib
import io
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click

from moec.manifests.errors import ExecutionError, MissingDependency, MoecError

from .terminal import output

EXIT_FAULT = 70
EXIT_INTERRUPTED = 130
_COMMANDS = {
    "compile": "compile:compile_command",
    "compare": "compare:compare_command",
    "run": "run:run_command",
    "generate": "generate:generate_command",
    "eval": "evaluate:eval_command",
    "inspect": "inspect:inspect_command",
    "verify": "verify:verify_command",
    "pack": "pack:pack_command",
    "unpack": "unpack:unpack_command",
    "bench": "bench:bench_command",
    "simulate": "simulate:simulate_command",
    "tune": "tune:tune_command",
    "demo": "demo:demo_command",
    "profile-device": "profile_device:profile_device_command",
}
_EXTRAS = {
    "torch": "compile",
    "transformers": "compile",
    "safetensors": "compile",
    "optimum": "compile",
    "matplotlib": "compile",
    "huggingface_hub": "compile",
    "datasets": "eval",
    "evaluate": "eval",
    "rouge_score": "eval",
}


class MoecGroup(click.Group):
    """A group that imports a command when it is named, and turns errors into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all commands, in the order of the work."""
        return [name for name in _COMMANDS if self.get_command(ctx, name) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command and return it, or None if there is no command of that name."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].partition(":")
        name = f"moec.cli.commands.{module}"
        try:
            command = getattr(importlib.import_module(name), attribute)
        except ModuleNotFoundError as problem:
            if problem.name == name:
                return None
            raise
        if not isinstance(command, click.Command):
            raise TypeError(f"`{name}:{attribute}` is not a command")
        return command

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and exit with its code. With standalone_mode=False, errors are raised to the caller."""
        run = partial(super().main, args, prog_name, complete_var, standalone_mode=False, **extra)
        if not standalone_mode:
            return run()
        sys.exit(_exit_code(run))


def _exit_code(run: Callable[[], Any]) -> int:
    """Run the command line, print its error if there is one, and return the exit code."""
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
        return _interrupted() if _is_interrupt(problem) else _told(problem)
    finally:
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


def _is_interrupt(problem: BaseException) -> bool:
    """Return whether an interrupt is the cause. An extension interrupted while it loads raises another error."""
    seen: BaseException | None = problem
    while seen is not None:
        if isinstance(seen, KeyboardInterrupt):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _interrupted() -> int:
    output.say("interrupted")
    return EXIT_INTERRUPTED


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


def version() -> str:
    """Return the installed version, or `unknown` in a tree that is not installed."""
    from importlib import metadata  # takes a seventh of the start of the command line, and is seldom used

    try:
        return metadata.version("moec")
    except metadata.PackageNotFoundError:
        return "unknown"


def _print_version(ctx: click.Context, parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        output.data(f"moec {version()}")
        ctx.exit()


@click.group("moec", cls=MoecGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
def cli() -> None:
    """Compile a mixture-of-experts language model for a device that cannot hold it, and run it there.

    \b
    moec compile MODEL_DIR --loss 2%          make a bundle that loses at most 2 % of the task's score
    moec run BUNDLE --prompt "Question: ..."  continue a prompt in a memory budget
    moec eval BUNDLE --data test.jsonl        measure the score of the bundle, with its interval
    """
