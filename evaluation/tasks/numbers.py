"""The number that a solution ends with, in the form of GSM8K: the working, then `#### n`."""

from __future__ import annotations

import re

_NUMBER = r"[+-]?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_MARKED = re.compile(r"####[ \t]*\$?(" + _NUMBER + ")")
_ANYWHERE = re.compile(r"(?:(?<![\w.)])[+-])?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")


def answer_number(text: str) -> str | None:
    """Return the answer in a solution: the first number after `####`, else the last number of the text.

    Equal numbers give equal strings: no commas, currency sign, plus, leading zeros, or trailing zeros after the point.
    None if there is no number.
    Digits and minus are ASCII, and digits in groups are joined by commas alone, as in the graders of GSM8K and of
    lm-evaluation-harness. So scores compare with published ones.
    """
    marked = _MARKED.search(text)
    if marked:
        return _plain_number(marked.group(1))
    numbers = _ANYWHERE.findall(text)
    return _plain_number(numbers[-1]) if numbers else None


def _plain_number(text: str) -> str:
    digits = text.replace(",", "").replace("$", "").lstrip("+-")
    whole, _, fraction = digits.partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return "-" + value if text.startswith("-") and value != "0" else value
