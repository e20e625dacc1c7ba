"""Untrusted TOML: its size is counted before anything is built from it."""

from __future__ import annotations

import re
import sys
from typing import Any

from .limits import MAX_TOML_BYTES, MAX_TOML_DEPTH, MAX_TOML_TOKENS, MAX_TOML_WORD_CHARACTERS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

_SHOWN_CHARACTERS = 200
# A text without an end reaches to the end of its line or of the file, so every alternative matches where it begins.
_TOKEN = re.compile(
    rb'"""(?:[^"\\]|\\.|"(?!""))*(?:"{3,5}|\\?\Z)'
    rb"|'''(?:[^']|'(?!''))*(?:'{3,5}|\Z)"
    rb'|"(?:[^"\\\n]|\\[^\n])*"?'
    rb"|'[^'\n]*'?"
    rb"|\#[^\n]*"
    rb"|[\[\]{}=,.\n]"
    rb"|[\w+-]+",
    re.DOTALL,
)
_OPENING, _CLOSING = (b"[", b"{"), (b"]", b"}")


def load_strict_toml(data: bytes) -> dict[str, Any]:
    """Parse TOML of bounded size. Bad UTF-8 is an error.

    Size, tokens, nesting, parts of dotted keys and lengths of numbers are counted in the bytes before parsing:
    64 KiB of `a.a.a` take 4 GiB as tables.
    data: UTF-8.
    Raises ValueError; the message follows the name of the file.
    """
    if len(data) > MAX_TOML_BYTES:
        raise ValueError(f"it has {len(data)} bytes, more than the limit of {MAX_TOML_BYTES}")
    _check_structure(data)
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)[:_SHOWN_CHARACTERS]) from error


def _check_structure(data: bytes) -> None:
    """Count the tokens of TOML without parsing it. Raises ValueError."""
    tokens = depth = dots = 0
    for match in _TOKEN.finditer(data):
        token = match.group()
        tokens += token[:1] not in b"\n#"
        if token in _OPENING:
            depth += 1
        elif token in _CLOSING:
            depth -= 1
        if token == b".":
            dots += 1
        elif len(token) == 1 and token in b"[]{}=,\n":
            dots = 0
        elif len(token) > MAX_TOML_WORD_CHARACTERS and token[:1] not in (b'"', b"'", b"#"):
            raise ValueError(f"a number or a name has more than {MAX_TOML_WORD_CHARACTERS} characters")
        if tokens > MAX_TOML_TOKENS:
            raise ValueError(f"it has more than {MAX_TOML_TOKENS} keys, values and signs")
        if depth > MAX_TOML_DEPTH or dots >= MAX_TOML_DEPTH:
            raise ValueError(f"nested more than {MAX_TOML_DEPTH} deep")
