"""Long answers as JSON, in parts that are not copied."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from .errors import json_bytes

_PIECE_BYTES = 16 << 10


class EncodedList:
    """A list for `json_parts` that is kept as JSON, which takes a tenth of the memory of its values."""

    def __init__(self) -> None:
        self._data = bytearray()

    def __bool__(self) -> bool:
        return bool(self._data)

    def extend(self, values: Iterable[Any]) -> None:
        """Add values at the end."""
        for value in values:
            self._data += (b"," if self._data else b"") + json_bytes(value)

    @property
    def parts(self) -> tuple[bytes, bytearray, bytes]:
        return b"[", self._data, b"]"


def json_parts(value: Any) -> list[bytes | bytearray]:
    """Return the JSON of a value in parts. An EncodedList inside is not copied."""
    mark = secrets.token_hex(16)  # no text of a client can have it
    lists: list[EncodedList] = []

    def mark_of(value_list: Any) -> str:
        if not isinstance(value_list, EncodedList):
            raise TypeError(f"{type(value_list).__name__} has no JSON")
        lists.append(value_list)
        return mark

    data = json.dumps(value, separators=(",", ":"), allow_nan=False, default=mark_of).encode()
    if not lists:
        return [data]
    first, *rest = data.split(f'"{mark}"'.encode())
    parts: list[bytes | bytearray] = [first]
    for value_list, after in zip(lists, rest, strict=True):
        parts += [*value_list.parts, after]
    return parts


def pieces(parts: Iterable[bytes | bytearray]) -> Iterator[bytes]:
    """Yield the bytes of parts in pieces. A connection takes the next one when the client has read."""
    for part in parts:
        for start in range(0, len(part), _PIECE_BYTES):
            yield bytes(part[start : start + _PIECE_BYTES])
