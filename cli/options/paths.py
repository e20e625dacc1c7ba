"""Arguments and options that are paths. A path that no file system can hold is refused before a command begins."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from moec.manifests.bundle import MANIFEST_NAME
from moec.manifests.errors import InputError
from moec.manifests.files.output_file import STDOUT, check_output, output_file

from ..terminal.help_sections import section_option

MAX_PATH_BYTES = 4095
"""Length of a path, bytes: the system's limit without the zero at its end."""
MAX_NAME_BYTES = 255
"""Length of a part of a path, bytes: what the usual file systems hold."""


class PathType(click.Path):
    """A path that a file system can hold, as a Path."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse an empty path, one with a zero byte, and one that is too long. Raises BadParameter."""
        if (fault := path_fault(os.fspath(value))) is not None:
            self.fail(fault, param, ctx)
        return super().convert(value, param, ctx)


class OutputFileType(PathType):
    """A file that a command will write, checked at once. `-` is standard output."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the checked path. Raises BadParameter, and InputError and DoesNotFit as `check_output` does."""
        path = super().convert(value, param, ctx)
        if os.fspath(value).endswith("/"):
            self.fail(f"{value!r} names a folder, expected a file", param, ctx)
        if path == STDOUT and os.fspath(value) != str(STDOUT):  # `./-` is a file
            path = path.absolute()
        refuse_inside_bundle(path)
        check_output(path)
        return path


class PlaceType(click.types.StringParamType):
    """A path, a name or a URL, as text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse a text that can be none of them. Raises BadParameter."""
        text = super().convert(value, param, ctx)
        if (fault := path_fault(text)) is not None:
            self.fail(fault, param, ctx)
        return text


def refuse_inside_bundle(path: Path) -> None:
    """Raise InputError for a file that a command would write into a bundle: each file of a bundle has its place."""
    if path != STDOUT and os.path.lexists(path.parent / MANIFEST_NAME):
        raise InputError(
            f"`{path}` lies in the bundle `{path.parent}`, which a further file damages", "name a file elsewhere"
        )


def refuse_lost_inputs(command: click.Command, values: Mapping[str, Any]) -> None:
    """Raise InputError if a file that a command will write is one that it reads.

    values: the converted arguments and options, by name.
    """
    outputs = [parameter.name for parameter in command.params if isinstance(parameter.type, OutputFileType)]
    for name, written in values.items():
        if name not in outputs or not _is_file(written):
            continue
        for other, value in values.items():
            for read in value if isinstance(value, (tuple, list)) else (value,):
                if other != name and _is_file(read) and os.path.samefile(written, read):
                    sentence = f"`{written}` is read by this command, so it cannot be written"
                    raise InputError(sentence, "name another file")


def _is_file(value: object) -> bool:
    try:
        return isinstance(value, (str, Path)) and value != STDOUT and os.path.isfile(value)
    except ValueError:  # a zero byte in a text that is no path
        return False


def path_fault(text: str) -> str | None:
    """Return the reason why a text is no path on any file system, or None. Parts of a URL may have any length."""
    try:
        data = os.fsencode(text)
    except UnicodeEncodeError:
        return f"{text[:40]!r} is no text that a file can be named with"
    if not data:
        return "the path is empty"
    if b"\0" in data:
        return f"{text[:40]!r} has a zero byte, which no path may have"
    if len(data) > MAX_PATH_BYTES:
        return f"{text[:40]!r}... has {len(data)} bytes, a path may have {MAX_PATH_BYTES}"
    longest = max(data.split(b"/"), key=len)
    if len(longest) > MAX_NAME_BYTES and "://" not in text:
        return f"{text[:40]!r}... has a part of {len(longest)} bytes, a name may have {MAX_NAME_BYTES}"
    return None


PATH = PathType()
OUTPUT_FILE = OutputFileType()
PLACE = PlaceType()
bundle_argument = click.argument("bundle", type=PATH)
file_option = partial(click.option, type=PATH, metavar="FILE")
output_option = partial(click.option, type=OUTPUT_FILE, metavar="FILE")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_task = section_option("Task")
work_memory_option = section_option("Machine")(
    "--memory",
    metavar="SIZE",
    help="Memory for the work. One layer is loaded at a time.  [default: 7/8 of the machine's]",
)
test_memory_option = click.option(
    "--memory", metavar="SIZE", help="Memory of the self-test.  [default: 7/8 of what is free]"
)
slots_option = click.option(
    "--slots",
    type=int,
    metavar="N",
    help="Sequences decoded at once.  [default: 32, in a server 4, or fewer that fit; in eval more for short texts]",
)
shots_option = _task(
    "--shots", type=int, default=0, show_default=True, metavar="N", help="Solved examples before each item."
)
limit_option = _task(
    "--limit", type=int, metavar="N", help="Take N items of each split, chosen by hash.  [default: all]"
)
item_seed_option = _task(
    "--seed", type=int, default=0, show_default=True, help="Seed of the choice of items and examples."
)
per_item_option = output_option("--per-item", help="Write JSONL, a line per item.")
long_items_option = _task(
    "--long-items",
    type=click.Choice(["truncate", "skip", "refuse"]),
    default="truncate",
    show_default=True,
    help="Items that exceed the context: cut their document (a question is left out), leave them out, or stop.",
)


def write_json_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write a line per row. The file appears when it is complete. Raises the errors of `output_file`."""
    with output_file(path) as file:
        for row in rows:
            file.write(sound_json(row))


def sound_json(value: object, indent: int | None = None) -> bytes:
    """Return a value as JSON in UTF-8, and a line end. What JSON or UTF-8 cannot hold is replaced.

    Half of a surrogate pair becomes U+FFFD; NaN and infinities become null.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent).encode() + b"\n"
    except ValueError:  # also what UTF-8 cannot hold
        return json.dumps(_sound(value), ensure_ascii=False, allow_nan=False, indent=indent).encode() + b"\n"


def _sound(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_sound(str(name) if isinstance(name, float) else name): _sound(item) for name, item in value.items()}
    return [_sound(item) for item in value] if isinstance(value, list | tuple) else value
