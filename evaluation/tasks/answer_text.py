"""The part of an answer that is compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..metrics import Scores

TEXT, NUMBER = "text", "number"
COMPARISONS = (TEXT, NUMBER)
_NUMBER = r"[+-]?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_MARKED = re.compile(r"####[ \t]*\$?(" + _NUMBER + ")")
_ANYWHERE = re.compile(r"(?:(?<![\w.)])[+-])?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")


@dataclass(frozen=True, slots=True)
class AnswerText:
    """The part of an answer that is compared.

    pattern: a regular expression of RE2, or None for the whole text. The first match is the answer, or its first group.
    compare: `text`, or `number` for the number after `####`, else the last number.
    """

    pattern: Any = None
    compare: str = TEXT

    def found(self, text: str) -> str | None:
        """Return the part of a text that the pattern finds, or None."""
        if self.pattern is None:
            return text
        match = self.pattern.search(text)
        if match is None:
            return None
        return str((match.group(1) if self.pattern.groups else match.group()) or "")

    def fault(self, reference: str) -> str | None:
        """Return why a reference cannot be compared, or None."""
        if self.compare == NUMBER and answer_number(self.reference(reference)) is None:
            return "holds no number to compare with"
        return None

    def prediction(self, text: str) -> str:
        """Return the compared part of a prediction; empty without a match."""
        return self.found(text) or ""

    def reference(self, text: str) -> str:
        """Return the compared part of a reference; the whole text without a match."""
        matched = self.found(text)
        return text if matched is None else matched

    def exact_match(self, predictions: Sequence[str], references: Sequence[str]) -> Scores:
        """Return 1 where prediction and reference are equal, else 0; [n]. Without a number the score is 0."""
        scores = []
        for prediction, reference in zip(
            map(self.prediction, predictions), map(self.reference, references), strict=True
        ):
            if self.compare == NUMBER:
                number = answer_number(prediction)
                scores.append(float(number is not None and number == answer_number(reference)))
            else:
                scores.append(float(prediction.strip() == reference.strip()))
        return np.array(scores, dtype=np.float64)


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
