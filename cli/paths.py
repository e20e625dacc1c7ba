"""Arguments and options that are paths, said once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import click

from moec.manifests.errors import InputError

PATH = click.Path(path_type=Path)
bundle_argument = click.argument("bundle", type=PATH)
file_option = partial(click.option, type=PATH, metavar="FILE")


def write_json_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """A line per row; the file appears when it is complete. Raises InputError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        beside.replace(path)
    except OSError as problem:
        beside.unlink(missing_ok=True)
        raise InputError(f"`{path}` cannot be written: {problem.strerror}", "name another file") from problem
