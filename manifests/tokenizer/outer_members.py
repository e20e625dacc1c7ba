"""The members of a `tokenizer.json` except its vocabulary, which is nearly all of the bytes.

The vocabulary is not parsed here. It is only searched for members that would replace those that are returned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

_BLANKS = b" \t\r\n"
_LIST_FOLLOWS = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*\[")
_NUMBER_FOLLOWS = re.compile(rb"[ \t\r\n]*(?:[^ \t\r\n:]|:[ \t\r\n]*-?[0-9])")
_COLON = ord(":")
_CANDIDATES = 4


def outer_members(data: bytes) -> dict[str, Any] | None:
    """Return all members except the vocabulary of a BPE model that is the last member, as the library writes it.

    Returns None for a file of another form, which must be parsed as a whole.
    The rest of the file, after the beginning of the vocabulary, is searched for members that would replace those
    checked here.
    """
    at = -1
    for _ in range(_CANDIDATES):
        at = data.find(b'"model"', at + 1)
        if at < 0:
            return None
        outer = _members(data[:at])
        if outer is not None:
            break
    else:
        return None
    opening = data.find(b"{", at)
    vocabulary = data.find(b'"vocab"', at)
    if opening < 0 or vocabulary < 0 or data[at + 7 : opening].strip(_BLANKS) != b":" or "model" in outer:
        return None
    model = _members(data[opening:vocabulary])
    if model is None or model.get("type") != "BPE" or model.get("continuing_subword_prefix"):
        return None
    return {**outer, "model": model} if _has_plain_vocabulary(data, vocabulary + len(b'"vocab"')) else None


def _has_plain_vocabulary(data: bytes, start: int) -> bool:
    """Return whether the rest of a file is numbers by name, then `merges`, then texts.

    start: the byte after the name `vocab`.
    The name of a member ends in a letter or a digit, a quote and a colon. A quote inside a text follows a backslash.
    A quote that begins a text follows neither a letter, a digit nor a backslash.
    """
    opening = data.find(b"{", start)
    merges = len(data)
    while (merges := data.rfind(b'"merges"', start, merges)) >= 0:
        if _LIST_FOLLOWS.match(data, merges + len(b'"merges"')) is not None:
            break
    if merges < 0 or opening < 0 or data[start:opening].strip(_BLANKS) != b":":
        return False
    inside = partial(_places, data, start=opening + 1, end=merges)
    if any(data[at + 4 : at + 5] in (b"4", b"5", b"6", b"7") for at in inside(rb"\u00")):
        return False  # escaped letters could spell any name
    for character in (b"{", b"["):
        if any(_ends_name(data, colon) for at in inside(character) if data[colon := _before(data, at)] == _COLON):
            return False
    for quoted in (b'"type"', b'"continuing_subword_prefix"'):
        if any(_NUMBER_FOLLOWS.match(data, at + len(quoted)) is None for at in inside(quoted)):
            return False
    return not any(_ends_name(data, at) for at in _places(data, b":", data.find(b"[", merges), len(data)))


def _places(data: bytes, sought: bytes, start: int, end: int) -> Iterator[int]:
    """Yield the positions of a part in a range of bytes."""
    at = data.find(sought, start, end)
    while at >= 0:
        yield at
        at = data.find(sought, at + 1, end)


def _before(data: bytes, at: int) -> int:
    """Return the position of the last byte before `at` that is not blank."""
    at -= 1
    while at > 0 and data[at] in _BLANKS:
        at -= 1
    return at


def _ends_name(data: bytes, colon: int) -> bool:
    """Return whether a colon follows the name of a member."""
    quote = _before(data, colon)
    return data[quote] == ord('"') and data[quote - 1 : quote].isalnum()


def _members(beginning: bytes) -> dict[str, Any] | None:
    """Return the members of an object that is cut before another name; None if the bytes are something else."""
    members = beginning.rstrip(_BLANKS)
    members = members[:-1] if members.endswith(b",") else members
    try:
        plain = json.loads(members + b"}", object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError):
        return None
    return plain if isinstance(plain, dict) else None


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of an object, for json.loads. Raises ValueError if a name occurs twice."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return members
