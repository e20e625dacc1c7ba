"""Files made from the code: the schema of the manifest and the page of commands. Tests compare them with the tree.

python -m moec.cli.documents schema    manifests/schema.json
python -m moec.cli.documents commands  docs/cli.md
"""

from __future__ import annotations

import inspect
import sys

import click

from .terminal import output

HEAD = """# The command line

`make docs` writes this page. `moec COMMAND --help` says more, `--help-all` has all options.
Text and results go to stdout. Messages and progress go to stderr. `--json` prints one JSON object.

`eval "$(_MOEC_COMPLETE=bash_source moec)"` in `~/.bashrc` completes commands and options (`zsh_source`, `fish_source`).

| Exit code | Meaning |
|---|---|
| 0 | done |
| 1 | an error that the user can act on, with a hint |
| 2 | wrong usage |
| 3 | a damaged bundle |
| 4 | a channel without a bundle for this device |
| 5 | a store that does not answer, or answers wrongly |
| 6 | a pull of a sequence that was rolled back: nothing was installed |
| 70 | a fault in moec: please report it |
| 75 | no space on the disk, or another process in the way: try again later |
| 129, 130, 143 | interrupted by SIGHUP, SIGINT or SIGTERM |
"""


_RUNS = ("run", "chat", "generate", "serve", "eval", "lm-eval", "bench")


def schema_text() -> str:
    """Return the JSON Schema of `moec.json`, as it is published."""
    from moec.manifests.codec import canonical_json, manifest_schema

    return canonical_json(manifest_schema()).decode()


def commands_page() -> str:
    """Return the text of `docs/cli.md`: every command with its arguments, options and examples.

    Options that several commands have alike stand once.
    """
    from .commands.running.settings import setting_rows
    from .main import cli
    from .options.set_option import COMPILE_SETTINGS, RUN_SETTINGS

    ctx = click.Context(cli, info_name="moec")
    commands = {name: command for name in cli.list_commands(ctx) if (command := cli.get_command(ctx, name))}
    options = {name: list(map(_option_row, _options(command))) for name, command in commands.items()}
    users: dict[str, list[str]] = {}
    for name, rows in options.items():
        for row in rows:
            users.setdefault(row, []).append(name)
    parts = [HEAD]
    for name, command in commands.items():
        arguments = [_argument(p) for p in command.params if isinstance(p, click.Argument)]
        first, *others = inspect.cleandoc(command.help or "").split("\n\n")
        examples = [paragraph.removeprefix("\b\n") for paragraph in others if paragraph.startswith("\b")]
        lines = [f"## moec {name}", "", f"`{' '.join([f'moec {name}', *arguments])}`", "", first]
        lines += ["", f"```\n{examples[0]}\n```"] if examples else []
        rows = [row for row in options[name] if len(users[row]) == 1]
        lines += ["", *rows] if rows else []
        if count := len(options[name]) - len(rows):
            lines += ["", f"[Shared options](#shared-options): {count}."]
        parts.append("\n".join(lines) + "\n")
    parts.append(f"## Shared options\n\n*Runs* are {', '.join(_RUNS[:-1])} and {_RUNS[-1]}.\n")
    groups: dict[str, list[str]] = {}
    for row, names in users.items():
        if len(names) > 1:
            others = [name for name in names if name not in _RUNS]
            text = ", ".join(["runs", *others] if set(_RUNS) <= set(names) else names)
            groups.setdefault(text, []).append(row)
    for text, rows in groups.items():
        parts.append(f"Of {text}:\n\n" + "\n".join(rows) + "\n")
    parts.append("## Settings\n\n`--set NAME=VALUE` takes these, listed by `moec settings`.\n")
    for kind, table in (("run", RUN_SETTINGS), ("compile", COMPILE_SETTINGS)):
        parts.append(f"Of a {kind}:\n")
        for setting in setting_rows(table):
            parts.append(f"* `{setting['name']}={setting['values']}` {setting['text']} [default: {setting['default']}]")
        parts.append("")
    return "\n".join(parts)


def _options(command: click.Command) -> list[click.Option]:
    options = [option for option in command.params if isinstance(option, click.Option)]
    return [option for option in options if option.name not in ("help_all", "as_json")]


def _argument(argument: click.Argument) -> str:
    """Return the argument as a command line shows it. A metavar may have the brackets of an optional argument."""
    name = argument.metavar or (argument.name or "").upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _option_row(option: click.Option) -> str:
    """Return names, value and meaning of an option as an item. A switch with two forms has both: `--this / --that`."""
    names = " / ".join(", ".join(forms) for forms in (option.opts, option.secondary_opts) if forms)
    if not option.is_flag:
        choices = option.type.choices if isinstance(option.type, click.Choice) else ()
        names += f" {option.metavar or '|'.join(map(str, choices)) or option.type.name.upper()}"
    text = (option.help or "").replace("  [default", " [default")
    if option.required:
        text += " Required."
    elif option.show_default:
        default = ",".join(option.default) if isinstance(option.default, tuple) else option.default
        text = f"{text} [default: {default}]".strip()
    return f"* `{names}` {text}"


if __name__ == "__main__":
    output.data({"schema": schema_text, "commands": commands_page}[sys.argv[1]](), end="")
