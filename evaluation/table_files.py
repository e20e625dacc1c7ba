"""Rows of Parquet and Arrow files, which a process with a limit of memory reads."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from moec.manifests.errors import DataError, MissingDependency

from .text_files import MAX_LINE_BYTES, MAX_ROWS, Row, Rows, counted

MAX_MEMORY_BYTES = 1 << 30
"""Memory for reading a table. Decompressed pages and some rows are in memory at once."""
_SCRIPT = Path(__file__).with_name("table_reading.py")
# malloc instead of pyarrow's own allocators, which reserve more address space than they use.
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system"}


def read_tables(files: Sequence[Path], form: str) -> Rows:
    """Return the rows of files of one form. Each row's place is its file and its number from 1.

    form: `parquet` or `arrow`.
    Raises MissingDependency without pyarrow; `read` raises DataError.
    """
    package = importlib.util.find_spec("pyarrow")
    if package is None or package.origin is None:
        raise MissingDependency(
            f"the {form.capitalize()} file `{files[0]}` needs the package `pyarrow`, which is not installed",
            "pip install 'moec[eval]'",
        )
    folder = str(Path(package.origin).parent.parent)
    source = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"

    def read(fields: Collection[str]) -> Iterator[Row]:
        return counted(_rows(files, form, folder, sorted(fields)), source)

    return Rows(source, read)


def _rows(files: Sequence[Path], form: str, folder: str, fields: Sequence[str]) -> Iterator[Row]:
    command = [sys.executable, "-I", "-S", str(_SCRIPT), folder, form, json.dumps(fields)]
    command += [str(MAX_MEMORY_BYTES), str(MAX_ROWS)]
    child = subprocess.Popen(
        [*command, *(str(file.absolute()) for file in files)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | _ENVIRONMENT,
    )  # fmt: skip
    index, number = 0, 0
    try:
        if child.stdout is None:
            raise AssertionError("a pipe was asked for")
        while line := child.stdout.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise DataError(
                    f"`{files[index]}:{number + 1}`: expected rows of at most {MAX_LINE_BYTES >> 20} MiB",
                    "give a part of the data",
                )
            value = json.loads(line)
            if isinstance(value, str):
                break
            number = number + 1 if value[0] == index else 1
            index = value[0]
            yield f"`{files[index]}:{number}`", value[1]
        else:
            value = "reading it ends without a result"
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    if value:
        raise DataError(
            f"`{files[index]}` cannot be read as a whole {form.capitalize()} file: {value}",
            "give JSON Lines, a JSON list, CSV, Parquet or Arrow",
        )
