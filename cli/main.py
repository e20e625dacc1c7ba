"""`moec`: the group of commands, loaded on demand, and the one place where errors become messages and exit codes.

Exit codes: 0 done; 1 something the user can act on; 2 usage; 3 a damaged bundle; 70 a fault in moec; 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click

from moec.manifests.errors import ExecutionError, InputError, MissingDependency, MoecError

from . import output

EXIT_FAULT = 70
EXIT_INTERRUPTED = 130
_COMMANDS = {
    "compile": "compile:compile_command",
    "run": "run:run_command",
    "generate": "generate:generate_command",
    "eval": "evaluate:eval_command",
    "inspect": "inspect:inspect_command",
    "verify": "verify:verify_command",
    "pack": "pack:pack_command",
    "unpack": "pack:unpack_command",
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
    """Commands are imported when they are named; errors of any of them end here."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands, in the order of the work."""
        return [name for name in _COMMANDS if self.get_command(ctx, name) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None if there is none of that name."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].partition(":")
        name = f"moec.cli.{module}"
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
        """Run and leave with an exit code. standalone_mode=False hands errors to the caller instead."""
        run = partial(super().main, args, prog_name, complete_var, standalone_mode=False, **extra)
        if not standalone_mode:
            return run()
        sys.exit(_exit_code(run))


def _exit_code(run: Callable[[], Any]) -> int:
    """Run the command line; say what went wrong, if anything did."""
    try:
        code = run()
        return code if isinstance(code, int) else 0
    except click.Abort:
        output.say("interrupted")
        return EXIT_INTERRUPTED
    except click.ClickException as problem:
        problem.show()
        return problem.exit_code
    except MoecError as problem:
        return _told(problem)
    except ModuleNotFoundError as problem:
        return _missing_module(problem)
    except MemoryError:
        return _told(ExecutionError("the system has no memory left for this", "close other programs, or ask for less"))
    except OSError as problem:
        return _told(_refused(problem))
    except Exception:
        return _fault()


def _told(problem: MoecError) -> int:
    output.error(problem)
    return problem.exit_code


def _refused(problem: OSError) -> InputError:
    """What the system refused and nobody nearer to it has put into words."""
    place = f"`{os.fsdecode(problem.filename)}`: " if isinstance(problem.filename, (str, bytes)) else ""
    return InputError(f"{place}{problem.strerror or problem}", "check path, permissions and disk")


def _missing_module(problem: ModuleNotFoundError) -> int:
    package = (problem.name or "").partition(".")[0]
    if package not in _EXTRAS:
        return _fault()
    missing = MissingDependency(
        f"this command needs the package `{package}`, which is not installed",
        f'pip install "moec[{_EXTRAS[package]}]"',
    )
    return _told(missing)


def _fault() -> int:
    output.say(traceback.format_exc(), end="")
    output.say("this is a fault in moec: please report it with the lines above and the command you ran")
    return EXIT_FAULT


def version() -> str:
    """The installed version; `unknown` in a tree that was never installed."""
    from importlib import metadata  # a seventh of what starting the command line takes, and seldom asked

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
    moec compile MODEL_DIR --loss 2%          a bundle that loses at most 2 % of the task's score
    moec run BUNDLE --prompt "Question: ..."  text, from experts streamed inside a memory budget
    moec eval BUNDLE --data test.jsonl        what the bundle scores, with its interval
    """


def main() -> None:
    """The console script."""
    # Threads that spin while they wait starve each other as soon as anything else runs: on a busy machine with two
    # cores 400 items took 247 s with the default and 19 s without. Must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    cli.main(prog_name="moec")


if __name__ == "__main__":
    main()
