"""The part of an answer that is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..metrics import Scores
from .numbers import answer_number

TEXT, NUMBER = "text", "number"
COMPARISONS = (TEXT, NUMBER)


class Pattern(Protocol):
    """A regular expression of RE2."""

    @property
    def groups(self) -> int:
        """Number of groups."""

    def search(self, text: str, /) -> Any:
        """Return the first match, or None."""


@dataclass(frozen=True, slots=True)
class AnswerText:
    """The part of an answer that is compared.

    pattern: the first match is the answer, or its first group if it has one. None: the whole text.
    compare: `text`, or `number` for the number after `####`, else the last number.
    """

    pattern: Pattern | None = None
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
        found = self.found(text)
        return text if found is None else found

    def exact_match(self, predictions: Sequence[str], references: Sequence[str]) -> Scores:
        """Return 1 where prediction and reference are equal, else 0; [n]. Without a number the score is 0."""
        same: Callable[[str, str], bool] = _same_number if self.compare == NUMBER else _same_text
        pairs = zip(predictions, references, strict=True)
        return np.array([float(same(self.prediction(p), self.reference(r))) for p, r in pairs], dtype=np.float64)


def _same_text(prediction: str, reference: str) -> bool:
    return prediction.strip() == reference.strip()


def _same_number(prediction: str, reference: str) -> bool:
    number = answer_number(prediction)
    return number is not None and number == answer_number(reference)
