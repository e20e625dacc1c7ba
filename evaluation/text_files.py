"""Strict readers of JSON lines, JSON lists and CSV. Every error names its file and its line or row."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moec.manifests.errors import DataError
from moec.manifests.files.input_file import UnreadableFile, open_input, read_input
from moec.manifests.files.limits import JsonLimits
from moec.manifests.files.strict_json import check_structure

MAX_ROWS = 1 << 21
"""Rows of a split. The train split of wikitext-103 has 1,801,350."""
MAX_LINE_BYTES = 16 << 20
MAX_WHOLE_BYTES = 256 << 20
"""A JSON list is read as a whole."""
MAX_COLUMNS = 1 << 12
_DEPTH = 64
_LINE = JsonLimits(MAX_LINE_BYTES, containers=1 << 16, values=1 << 20, texts=1 << 20, depth=_DEPTH)
_WHOLE = JsonLimits(MAX_WHOLE_BYTES, containers=4 * MAX_ROWS, values=1 << 25, texts=1 << 25, depth=_DEPTH)
_MARK = b"\xef\xbb\xbf"  # of UTF-8, which some editors put first
_SPACE = " \t\r\n"
_HINT = 'write one JSON object per line, such as {"text": "..."}'

Row = tuple[str, dict[str, object]]
"""Place of an object for messages, its file and line, and the object."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Objects of a source, which are read one after another, from the beginning at each call.

    source: its name.
    read: yields the objects. It receives the names of the fields that are needed; empty: all fields.

    `read` raises DataError with the place for anything that is no object, and for a source without objects.
    """

    source: str
    read: Callable[[Collection[str]], Iterator[Row]]

    def first(self) -> Row:
        """Return the first object with all of its fields. Raises DataError."""
        return next(self.read(()))

    @classmethod
    def joined(cls, parts: list[Rows]) -> Rows:
        """Return the rows of several files."""
        name = parts[0].source if len(parts) == 1 else f"{parts[0].source} and {len(parts) - 1} more"

        def read(fields: Collection[str]) -> Iterator[Row]:
            for rows in parts:
                yield from rows.read(fields)

        return cls(name, read)


def counted(rows: Iterable[Row], source: str) -> Iterator[Row]:
    """Yield rows. Raises DataError if there is none, or if there are more than MAX_ROWS."""
    count = 0
    for row in rows:
        count += 1
        if count > MAX_ROWS:
            raise DataError(f"{row[0]}: expected at most {MAX_ROWS} rows", "give a part of the data")
        yield row
    if not count:
        raise DataError(f"`{source}`: expected rows, found none", "give more items")


def read_json(path: Path) -> Rows:
    """Return the objects of a file that holds a JSON list, with their rows from 1, or JSON lines, as `read_jsonl`.

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
    return Rows(str(path), lambda fields: counted(_list_rows(path), str(path))) if is_list else read_jsonl(path)


def _list_rows(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON list, each parsed when it is needed."""
    try:
        data = read_input(path, MAX_WHOLE_BYTES, follow_links=True).removeprefix(_MARK)
    except UnreadableFile as error:
        raise DataError(f"`{path}` {error}", "give a readable file; JSON Lines and CSV have no limit") from error
    try:
        check_structure(data, _WHOLE)
    except ValueError as error:
        raise DataError(f"`{path}`: JSON that cannot be read: {error}", _HINT) from error
    text = _decoded(data, f"`{path}`")
    del data
    decode = json.JSONDecoder().raw_decode
    at, number = _after_space(text, text.index("[") + 1), 0
    is_end = text[at : at + 1] == "]"
    while not is_end:
        number += 1
        place = f"`{path}:{number}`"
        value, at = _parsed(lambda start=at: decode(text, start), place)  # type: ignore[misc]
        yield place, _object(value, place)
        at = _after_space(text, at)
        is_end = text[at : at + 1] == "]"
        if not is_end and text[at : at + 1] != ",":
            raise DataError(f"{place}: malformed JSON: expecting ',' after the object", _HINT)
        at = _after_space(text, at + 1)
    if text[_after_space(text, at + (number == 0)) :]:
        raise DataError(f"`{path}`: malformed JSON: extra data after the list", _HINT)


def _after_space(text: str, at: int) -> int:
    """Return the place of the first character from `at` on that is no white space."""
    while text[at : at + 1] and text[at] in _SPACE:
        at += 1
    return at


def read_csv(path: Path) -> Rows:
    """Return the rows of a CSV file after its first line, which has the names of the columns. Every value is text.

    Raises DataError.
    """
    return Rows(str(path), lambda fields: counted(_csv_rows(path), str(path)))


def _csv_rows(path: Path) -> Iterator[Row]:
    try:
        descriptor = open_input(path, follow_links=True)
    except UnreadableFile as error:
        raise DataError(f"`{path}` {error}", "give a readable file") from error
    size, number = 0, 0

    def lines() -> Iterator[str]:
        nonlocal size
        while line := file.readline(MAX_LINE_BYTES + 1):
            size += len(line)
            if size > MAX_LINE_BYTES:
                raise DataError(
                    f"`{path}:{reader.line_num + 1}`: expected rows of at most {MAX_LINE_BYTES >> 20} MiB",
                    "repair the row",
                )
            yield line

    with open(descriptor, encoding="utf-8-sig", newline="") as file:
        csv.field_size_limit(MAX_LINE_BYTES)
        reader = csv.reader(lines(), strict=True)
        names: list[str] | None = None
        try:
            for values in reader:
                number, size = reader.line_num, 0
                if not values:
                    continue
                if names is None:
                    names = values
                    if len(names) > MAX_COLUMNS:
                        raise DataError(f"`{path}:{number}`: expected at most {MAX_COLUMNS} columns", "remove some")
                    continue
                if len(values) != len(names):
                    raise DataError(f"`{path}:{number}`: expected as many values as columns", "repair the row")
                yield f"`{path}:{number}`", dict(zip(names, values, strict=True))
        except UnicodeDecodeError as error:
            raise DataError(f"`{path}`: expected UTF-8 text, found a byte that is none", "save as UTF-8") from error
        except csv.Error as error:
            raise DataError(f"`{path}:{reader.line_num}`: malformed CSV: {error}", "repair the row") from error


def read_jsonl(path: Path) -> Rows:
    """Return the objects of a UTF-8 JSON-lines file. Blank lines are skipped; lines count from 1.

    A pipe is read at once, because its lines come only once.
    Raises DataError with file and line for anything that is not an object, and for a file without objects.
    """

    def read(fields: Collection[str] = ()) -> Iterator[Row]:
        count = 0
        for number, line in _lines(path):
            count += 1
            place = f"`{path}:{number}`"
            if count > MAX_ROWS:
                raise DataError(f"{place}: expected at most {MAX_ROWS} rows", "give a part of the data")
            yield place, _object(_loaded(line, place), place)
        if not count:
            raise DataError(f"`{path}:1`: expected JSON lines, found an empty file", _HINT)

    if path.is_file() or path.is_dir() or not path.exists():
        return Rows(str(path), read)
    rows = list(read())
    return Rows(str(path), lambda fields: iter(rows))


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


def _loaded(line: bytes, place: str) -> object:
    """Return the value of a line. Only a line with many signs can exceed a limit, so others are not counted."""
    try:
        if line.count(b"[") + line.count(b"{") > _DEPTH or line.count(b",") > _LINE.containers:
            check_structure(line, _LINE)
    except ValueError as error:
        raise DataError(f"{place}: JSON that cannot be read: {error}", _HINT) from error
    text = _decoded(line, place)
    return _parsed(lambda: json.loads(text), place)


def _decoded(data: bytes, place: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: expected UTF-8 text, found byte {data[error.start]:#04x}", "save as UTF-8"
        ) from error


def _parsed(parse: Callable[[], Any], place: str) -> Any:
    """Return what `parse` returns. Raises DataError where it fails."""
    try:
        return parse()
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: malformed JSON: {error.msg.lower()} at column {error.colno}", _HINT) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: JSON that cannot be read: {error}", _HINT) from error


def _object(value: object, place: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a JSON object, found {_KINDS.get(type(value), 'a number')}", _HINT)
    return value


_KINDS: dict[type, str] = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
