"""Strict reader of JSON lines. Every error names its file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moec.manifests.errors import DataError

MAX_LINE_BYTES = 16 << 20
_HINT = 'write one JSON object per line, such as {"text": "..."}'


@dataclass(frozen=True, slots=True)
class Rows:
    """Objects with their line or row number, and the name of their source."""

    source: str
    numbered: tuple[tuple[int, dict[str, object]], ...]

    def place(self, number: int) -> str:
        """Return file and line, for messages."""
        return f"`{self.source}:{number}`"


def read_jsonl(path: Path) -> Rows:
    """Return all objects of a UTF-8 JSON-lines file. Blank lines are skipped; lines count from 1.

    Raises DataError with file and line for anything that is not an object, and for a file without objects.
    """
    rows = tuple((number, _parse(line, f"`{path}:{number}`")) for number, line in _lines(path))
    if not rows:
        raise DataError(f"`{path}:1`: expected JSON lines, found an empty file", _HINT)
    return Rows(str(path), rows)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise DataError(f"`{path}:{number}`: expected lines of at most {MAX_LINE_BYTES >> 20} MiB", _HINT)
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise DataError(f"`{path}` cannot be read: {error.strerror}", "give a readable JSONL file") from error


def _parse(line: bytes, place: str) -> dict[str, object]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: expected UTF-8 text, found byte {line[error.start]:#04x}", "save as UTF-8"
        ) from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: malformed JSON: {error.msg.lower()} at column {error.colno}", _HINT) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: JSON that cannot be read: {error}", _HINT) from error
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a JSON object, found {_KINDS.get(type(value), 'a number')}", _HINT)
    return value


_KINDS: dict[type, str] = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
