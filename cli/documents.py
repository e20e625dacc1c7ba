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

`make docs` writes this page from the commands. Text and results go to stdout. Messages and progress go to stderr.
With `--json` a command prints one JSON object.

`eval "$(_MOEC_COMPLETE=bash_source moec)"` in `~/.bashrc` completes commands, options and files. For other shells it is
`zsh_source` or `fish_source`.

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


def schema_text() -> str:
    """Return the JSON Schema of `moec.json`, as it is published."""
    from moec.manifests.codec import canonical_json, manifest_schema

    return canonical_json(manifest_schema()).decode()


def commands_page() -> str:
    """Return the text of `docs/cli.md`: every command with its arguments, options and examples."""
    from .main import cli

    ctx = click.Context(cli, info_name="moec")
    parts = [HEAD]
    for name in cli.list_commands(ctx):
        command = cli.get_command(ctx, name)
        if command is not None:
            parts.append(_section(f"moec {name}", command))
    return "\n".join(parts)


def _section(title: str, command: click.Command) -> str:
    arguments = [_argument(p) for p in command.params if isinstance(p, click.Argument)]
    options = [p for p in command.params if isinstance(p, click.Option)]
    lines = [f"## {title}", "", f"`{' '.join([title, *arguments])} [OPTIONS]`", "", _prose(command.help or ""), ""]
    lines += ["| Option | Meaning |", "|---|---|"]
    lines += [f"| {_option_name(option)} | {_meaning(option)} |" for option in options]
    return "\n".join(lines) + "\n"


def _argument(argument: click.Argument) -> str:
    """Return the argument as a command line shows it. A metavar may have the brackets of an optional argument."""
    name = argument.metavar or (argument.name or "").upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _option_name(option: click.Option) -> str:
    """Return the names of an option and its value. A switch with two forms has both: `--this / --that`."""
    names = f"`{' / '.join(', '.join(forms) for forms in (option.opts, option.secondary_opts) if forms)}`"
    if option.is_flag:
        return names
    choices = option.type.choices if isinstance(option.type, click.Choice) else ()
    value = option.metavar or "|".join(map(str, choices)) or option.type.name.upper()
    return f"{names} {value}".replace("|", "\\|")


def _meaning(option: click.Option) -> str:
    text = (option.help or "").replace("|", "\\|").replace("  [default", " [default")
    if option.required:
        return f"{text} Required."
    default = ",".join(option.default) if isinstance(option.default, tuple) else option.default
    return f"{text} [default: {default}]".strip() if option.show_default else text


def _prose(text: str) -> str:
    """Return the help of a command as Markdown, with examples in fenced blocks."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        "```\n" + paragraph.removeprefix("\b\n") + "\n```" if paragraph.startswith("\b") else paragraph
        for paragraph in paragraphs
    )


if __name__ == "__main__":
    output.data({"schema": schema_text, "commands": commands_page}[sys.argv[1]](), end="")
