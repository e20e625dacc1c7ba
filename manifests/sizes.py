"""Sizes as text, like `2GiB`."""

from __future__ import annotations

import re
from fractions import Fraction

from .errors import OptionError

_UNITS = {
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


def parse_bytes(text: str, option: str = "") -> int:
    """Return the bytes of `512MiB`, `2.1GB` or `4096`. GB is 10^9, GiB is 2^30; a bare G is refused.

    option: names the option in the error.
    Raises OptionError.
    """
    shown = f"`{option} {text}`" if option else f"`{text}`"
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", text)
    if match is None or (match[2] and match[2] not in _UNITS):
        raise OptionError(f"{shown} is not a size", "write a size like `512MiB`, `2GiB`, `400KB` or `2GB`")
    if "." in match[1] and not match[2]:
        raise OptionError(f"{shown} is not a whole number of bytes", "add a unit, like `2GiB`")
    return int(Fraction(match[1]) * _UNITS[match[2] or "B"])


def human_bytes(count: float) -> str:
    """Return bytes as text, 1536 -> `1.5 KiB`: binary units, one decimal place, whole bytes below 1 KiB."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    power = min(4, (int(abs(count)).bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def option_bytes(size_bytes: int, given_bytes: int = 0) -> str:
    """Return a size as an option takes it, rounded up: `72MiB`, or `76MB` if another size was given in decimal units.

    given_bytes: that other size. A whole number of KB that is no whole number of MiB was given in decimal units.
    """
    unit = "MB" if given_bytes % _UNITS["MiB"] and given_bytes % _UNITS["KB"] == 0 else "MiB"
    return f"{-(-size_bytes // _UNITS[unit])}{unit}"


def exact_bytes(size_bytes: int) -> str:
    """Return a size as a text that `parse_bytes` reads as the same number, in the largest unit that divides it."""
    for unit in ("GiB", "MiB", "GB", "MB"):
        if size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]}{unit}"
    return str(size_bytes)


def limit_bytes(size_bytes: int) -> str:
    """Return a limit as text: exact if a whole number of MB or MiB gives it, else in MiB, rounded down."""
    exact = exact_bytes(size_bytes)
    return f"{size_bytes >> 20}MiB" if exact.isdigit() else exact
