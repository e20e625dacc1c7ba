"""All output: data to stdout, messages to stderr. Tables, sizes, errors and JSON are written only here."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

from moec.manifests.errors import ExecutionError, MoecError
from moec.manifests.sizes import human_bytes as human_bytes

_NUMBER = re.compile(r"[+-]?\d[\d.,]*( ?(%|[KMGT]?i?B|n?s|ms))?")
_BLOCKS = "▁▂▃▄▅▆▇█"
# C0 without line end and tab, DEL, C1, marks that change the direction of text, and surrogates.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_STRAY_LINE_END = re.compile(r"\n(?!- )")


def allows_colour() -> bool | None:
    """Return False if NO_COLOR is set. Return None otherwise: click then colours only terminals."""
    return False if os.environ.get("NO_COLOR") else None


def shown(text: str) -> str:
    """Return the text with control characters escaped, like `\\x1b`, because a bundle may hold any character.

    Line ends and tabs stay.
    """
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def say(text: str = "", *, end: str = "\n") -> None:
    """Write a message to stderr. Errors of stderr are ignored."""
    _talk(shown(text) + end)


def data(text: str, *, end: str = "\n") -> None:
    """Write a result to stdout at once. Raises ExecutionError; BrokenPipeError if the reader has closed the pipe."""
    generated(shown(text) + end)


def generated(text: str) -> None:
    """Write text of a model to stdout at once and unchanged. Raises the errors of `data`."""
    if sys.stdout is None:
        raise ExecutionError("standard output is closed", "open it, for example with `> FILE`")
    try:
        click.echo(text, nl=False, color=allows_colour())
    except BrokenPipeError:
        raise
    except OSError as problem:
        raise ExecutionError(
            f"standard output cannot be written: {problem.strerror or problem}", "check where it goes"
        ) from problem


def data_json(value: dict[str, Any]) -> None:
    """Write one JSON object on one line of stdout.

    Raises ValueError for numbers that JSON does not have, and the errors of `data`.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    data(_CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def error(problem: MoecError) -> None:
    """Write `error: <sentence>`, and `hint: <remedy>` if there is a remedy."""
    # Only a list has several lines. A line end inside a foreign text is escaped, so that it cannot imitate our output.
    message = _STRAY_LINE_END.sub(r"\\n", shown(problem.message))
    _talk(click.style("error:", fg="red", bold=True) + f" {message}\n")
    if problem.hint:
        _talk(click.style("hint:", fg="cyan") + f" {one_line(problem.hint)}\n")


def settle() -> None:
    """Flush stdout at the end of a command. Errors are ignored, because the command has already reported them."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):  # otherwise the interpreter would flush again at its end, and print an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _talk(text: str) -> None:
    with contextlib.suppress(OSError):
        click.echo(text, nl=False, err=True, color=allows_colour())


def one_line(value: object) -> str:
    """Return a value as text on one line."""
    return shown(str(value)).replace("\n", "\\n").replace("\t", "\\t")


def human_ms(nanoseconds: float | None) -> str:
    """Return nanoseconds as text in milliseconds; None -> `-`."""
    return "-" if nanoseconds is None else f"{nanoseconds / 1e6:.2f} ms"


def human_share(share: float | None, decimals: int = 1) -> str:
    """Return a share as text, 0.123 -> `12.3 %`; None -> `-`."""
    return "-" if share is None else f"{share:.{decimals}%}".replace("%", " %")


def human_seconds(seconds: float) -> str:
    """Return seconds as text, 75 -> `1:15`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def table(rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Return a table: two spaces between columns, numbers right-aligned, text left-aligned, a rule under the header."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    lines = [list(header), *cells] if header else cells
    if not lines:
        return ""
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    numeric = [bool(cells) and all(_is_numeric(row[at]) for row in cells) for at in range(len(widths))]

    def render(line: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    rendered = [render(line) for line in lines]
    if header:
        rendered.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(rendered)


def _is_numeric(cell: str) -> bool:
    return cell == "-" or _NUMBER.fullmatch(cell) is not None


def facts(pairs: Sequence[tuple[str, object]]) -> str:
    """Return a block of `name  value` lines."""
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{name.ljust(width)}  {one_line(value)}" for name, value in pairs)


def block(share: float) -> str:
    """Return a block character of this height, or a digit if stdout cannot show blocks.

    share: share of the height of a line, 0 to 1.
    """
    blocks = _BLOCKS if _shows_blocks() else "12345678"
    return blocks[min(len(blocks) - 1, max(0, int(share * len(blocks))))]


def dot() -> str:
    """Return the sign of a place without a block, one column wide."""
    return "·" if _shows_blocks() else "."


def _shows_blocks() -> bool:
    return (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")
