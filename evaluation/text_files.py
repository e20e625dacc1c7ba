"""Strict readers of JSON lines, JSON lists and CSV. Every error names its file and its line or row."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moec.manifests.errors import DataError
from moec.manifests.files.input_file import UnreadableFile, open_input, read_input

MAX_LINE_BYTES = 16 << 20
MAX_WHOLE_BYTES = 256 << 20
"""JSON lists and CSV files are read as a whole, and take a multiple of their size."""
_MARK = b"\xef\xbb\xbf"  # of UTF-8, which some editors put first
_HINT = 'write one JSON object per line, such as {"text": "..."}'


@dataclass(frozen=True, slots=True)
class Rows:
    """Objects with their line or row number, and the name of their source.

    files: several files, each with the number after which its rows begin; empty for one source.
    """

    source: str
    numbered: tuple[tuple[int, dict[str, object]], ...]
    files: tuple[tuple[int, str], ...] = ()

    def place(self, number: int) -> str:
        """Return file and line, for messages."""
        before, name = max((part for part in self.files if part[0] < number), default=(0, self.source))
        return f"`{name}:{number - before}`"

    @classmethod
    def joined(cls, source: str, parts: Sequence[Rows]) -> Rows:
        """Return the rows of several files. source: their common name."""
        numbered, files, before = list[tuple[int, dict[str, object]]](), list[tuple[int, str]](), 0
        for part in parts:
            files.append((before, part.source))
            numbered += [(before + number, row) for number, row in part.numbered]
            before = numbered[-1][0]
        return cls(source, tuple(numbered), tuple(files))


def read_json(path: Path) -> Rows:
    """Return all objects of a file that holds a JSON list, with their rows from 1, or JSON lines, as `read_jsonl`.

    Raises DataError.
    """
    try:
        descriptor = open_input(path, follow_links=True)
    except UnreadableFile as error:
        raise DataError(f"`{path}` {error}", "give a readable JSON file") from error
    try:
        is_list = os.pread(descriptor, 64, 0).removeprefix(_MARK).lstrip()[:1] == b"["
    finally:
        os.close(descriptor)
    if not is_list:
        return read_jsonl(path)
    values = _list(_loaded(_whole(path), f"`{path}`"))
    return _rows(path, [_object(value, f"`{path}:{at}`") for at, value in enumerate(values, start=1)])


def read_csv(path: Path) -> Rows:
    """Return the rows of a CSV file after its first line, which has the names of the columns. Every value is text.

    Raises DataError.
    """
    place = f"`{path}`"
    try:
        text = _whole(path).decode("utf-8")
        csv.field_size_limit(MAX_LINE_BYTES)
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        found = list[dict[str, object]]()
        for row in reader:
            if None in row or None in row.values():
                raise DataError(f"`{path}:{reader.line_num}`: expected as many values as columns", "repair the row")
            found.append(dict(row))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: expected UTF-8 text, found a byte that is none", "save as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"`{path}:{reader.line_num}`: malformed CSV: {error}", "repair the row") from error
    return _rows(path, found)


def _rows(path: Path, found: Sequence[dict[str, object]]) -> Rows:
    if not found:
        raise DataError(f"`{path}`: expected rows, found none", "give more items")
    return Rows(str(path), tuple(enumerate(found, start=1)))


def _whole(path: Path) -> bytes:
    """Return the bytes of a file without the mark that some editors put first."""
    try:
        return read_input(path, MAX_WHOLE_BYTES, follow_links=True).removeprefix(_MARK)
    except UnreadableFile as error:
        raise DataError(f"`{path}` {error}", "give a readable file; JSON Lines have no limit") from error


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


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
                    line = line.removeprefix(_MARK)
                if line.strip():
                    yield number, line
    except OSError as error:
        raise DataError(f"`{path}` cannot be read: {error.strerror}", "give a readable JSONL file") from error


def _parse(line: bytes, place: str) -> dict[str, object]:
    return _object(_loaded(line, place), place)


def _loaded(text: bytes, place: str) -> object:
    try:
        value: object = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: expected UTF-8 text, found byte {text[error.start]:#04x}", "save as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: malformed JSON: {error.msg.lower()} at column {error.colno}", _HINT) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: JSON that cannot be read: {error}", _HINT) from error
    return value


def _object(value: object, place: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a JSON object, found {_KINDS.get(type(value), 'a number')}", _HINT)
    return value


_KINDS: dict[type, str] = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
