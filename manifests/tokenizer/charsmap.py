"""The table of a `Precompiled` normalizer of SentencePiece: texts and their replacements.

It is a double array (https://github.com/s-yata/darts-clone) of 32-bit units. The replacements follow, each ended by a
zero byte. The tokenizers library follows its offsets without a check, and panics if they lead out of the table.
So they are checked here.
"""

from __future__ import annotations

import base64
import binascii
import sys
from array import array


class DamagedCharsmap(Exception):
    """A table that is not accepted. The message follows its name in a sentence."""


def check_charsmap(encoded: str) -> int:
    """Return the length of the longest replacement, bytes. Raises DamagedCharsmap.

    encoded: the table in base64.
    """
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DamagedCharsmap(f"is not base64: {error}") from error
    size = int.from_bytes(data[:4], "little")
    if len(data) < 8 or size % 4 or not 4 <= size <= len(data) - 4:
        raise DamagedCharsmap(f"has {len(data)} bytes, which do not hold the table that its head promises")
    units = array("I", data[4 : 4 + size])
    if sys.byteorder == "big":
        units.byteswap()
    replacements = data[4 + size :]
    try:
        replacements.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedCharsmap(f"has replacements that are not UTF-8 at byte {error.start}") from error
    _check_units(units, replacements)
    return max(map(len, replacements.split(b"\0")))


def _check_units(units: array[int], replacements: bytes) -> None:
    """Check that every step from every unit, and every replacement that it names, is inside the table."""
    count, end = len(units), len(replacements)
    for at, unit in enumerate(units):
        if unit >> 31:
            continue  # a value: it is read only where an earlier unit refers to it, and never followed
        target = at ^ ((unit >> 10) << ((unit & 512) >> 6))
        if target | 255 >= count:
            raise DamagedCharsmap(f"leads out of its table at unit {at}")
        if unit & 256:
            value = units[target] & 0x7FFFFFFF
            if value > end or (value < end and replacements[value] & 0xC0 == 0x80):
                raise DamagedCharsmap(f"names a replacement at byte {value} that does not begin there")
