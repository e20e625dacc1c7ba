"""`moec`: the group of commands, loaded on demand. Errors become messages and exit codes in `exit_codes.py`.

Warnings of other packages are for developers of moec, so they are hidden. MOEC_WARNINGS=1 shows them. Warnings that
modules of moec raise themselves are always shown.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TextIO

import click

from .exit_codes import exit_code
from .options.paths import refuse_lost_inputs
from .terminal import output

_SECTIONS = {
    "Compile a bundle": {
        "fit": "compiling.fit:fit_command",
        "compile": "compiling.compile:compile_command",
        "compare": "compiling.compare:compare_command",
        "export": "compiling.export:export_command",
        "export-plan": "compiling.export_plan:export_plan_command",
        "profile-device": "compiling.profile_device:profile_device_command",
        "demo": "compiling.demo:demo_command",
    },
    "Look at it": {
        "inspect": "bundles.inspect:inspect_command",
        "report": "bundles.report:report_command",
        "verify": "bundles.verify:verify_command",
    },
    "Run it": {
        "run": "running.run:run_command",
        "chat": "running.chat:chat_command",
        "generate": "running.generate:generate_command",
        "serve": "running.serve:serve_command",
        "settings": "running.settings:settings_command",
    },
    "Ship it": {
        "keygen": "shipping.signing:keygen_command",
        "sign": "shipping.signing:sign_command",
        "push": "shipping.push:push_command",
        "pull": "shipping.pull:pull_command",
        "rollback": "shipping.device:rollback_command",
        "installed": "shipping.device:installed_command",
        "pack": "bundles.archive:pack_command",
        "unpack": "bundles.archive:unpack_command",
    },
    "Measure it": {
        "eval": "measuring.evaluate:eval_command",
        "lm-eval": "measuring.lm_eval:lm_eval_command",
        "bench": "measuring.bench:bench_command",
        "simulate": "measuring.simulate:simulate_command",
        "tune": "measuring.tune:tune_command",
        "merge-traces": "measuring.merge_traces:merge_traces_command",
    },
}
"""Commands by the way of a bundle, with the places of their functions."""
_COMMANDS = {name: place for commands in _SECTIONS.values() for name, place in commands.items()}
VARIABLE = "MOEC_WARNINGS"
# Packages that print advice without `warnings` and `logging`: variable and value that turn it off.
_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "EVALUATE_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_WARNING_MODULES = ("warnings", "_py_warnings")
_show_warning = warnings.showwarning


def _run_guarded(command: click.Command, run: Callable[..., Any], *args: Any, **values: Any) -> Any:
    """Call the function of a command, if none of its outputs is one of its inputs."""
    refuse_lost_inputs(command, values)
    return run(*args, **values)


class MoecGroup(click.Group):
    """A group that imports a command when it is named, and exits with the code of `exit_code`."""

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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each section with their short help."""
        for title, commands in _SECTIONS.items():
            loaded = [(name, self.get_command(ctx, name)) for name in commands]
            with formatter.section(title):
                formatter.write_dl([(name, command.get_short_help_str(80)) for name, command in loaded if command])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Raises click.UsageError with the present spelling of an option of earlier versions."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as problem:
            from .options.set_option import present_spelling

            if (spelling := present_spelling(problem.option_name)) is None:
                raise
            raise click.UsageError(f"`{problem.option_name}` is now {spelling}.", problem.ctx) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. Before it runs, its outputs are compared with its inputs.

        Raises click.UsageError with the names that an unknown command is like.
        """
        if args and not args[0].startswith("-") and args[0] not in _COMMANDS:
            from difflib import get_close_matches

            names = " or ".join(f"`{name}`" for name in get_close_matches(args[0][:40], _COMMANDS, n=3))
            ctx.fail(f"No such command '{args[0][:40]}'." + (f" Did you mean {names}?" if names else ""))
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and command.callback is not None and not isinstance(command.callback, partial):
            command.callback = partial(_run_guarded, command, command.callback)
        return name, command, rest

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
        sys.exit(exit_code(run))


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


def hide_foreign_warnings() -> None:
    """Hide all warnings and log lines of other packages. With MOEC_WARNINGS=1, show all of them.

    Settings that the user made for one of these packages stay. Call before the packages are imported.
    """
    if os.environ.get(VARIABLE) == "1":
        if not sys.warnoptions:
            warnings.simplefilter("default")
        return
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    logging.lastResort = logging.NullHandler()  # handles lines of loggers without a handler
    warnings.showwarning = _show_own


def _show_own(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a warning if a function of moec raised it.

    The file name of a warning does not tell that, because other packages warn in the name of their caller.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _WARNING_MODULES:
        frame = frame.f_back
    is_own = str(frame.f_globals.get("__name__", "")).startswith("moec.")
    if is_own and "warn" in frame.f_code.co_names:  # otherwise an extension that it called warns
        _show_warning(message, category, filename, lineno, file, line)
