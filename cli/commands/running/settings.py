"""`moec settings`: what `--set` takes."""

from __future__ import annotations

from typing import Any

import click

from ...options.paths import json_option
from ...options.set_option import COMPILE_SETTINGS, RUN_SETTINGS, Table, spelled
from ...terminal import output


@click.command("settings", short_help="List what `--set NAME=VALUE` takes.")
@json_option
def settings_command(as_json: bool) -> None:
    """List the names and values of `--set`, for commands that run a bundle and for `moec compile`.

    Defaults are the fastest values that were measured. Others are for comparisons and unusual machines.

    \b
    moec settings --json
    moec run mixtral-moec --prompt "Question:" --set policy=lru --set prefetch=off
    """
    tables = {"run": RUN_SETTINGS, "compile": COMPILE_SETTINGS}
    if as_json:
        output.data_json({command: setting_rows(table) for command, table in tables.items()})
        return
    for command, table in tables.items():
        output.data(f"--set of `moec {command}`" + (" and other commands that run a bundle" * (command == "run")))
        for row in setting_rows(table):
            output.data(f"\n  {row['name']}={row['values']}  [default: {row['default']}]\n    {row['text']}")
        output.data("")


def setting_rows(table: Table) -> list[dict[str, Any]]:
    """Return name, values, default and text of each setting."""
    rows = []
    for name, (default, setting) in table.items():
        shown: Any = setting.default_text or default
        if isinstance(default, bool):
            shown = ("no", "yes")[default]
        values = "|".join(setting.choices) or setting.metavar or ("yes|no" if isinstance(default, bool) else "N")
        rows.append({"name": spelled(name), "values": values, "default": str(shown), "text": setting.text})
    return rows
