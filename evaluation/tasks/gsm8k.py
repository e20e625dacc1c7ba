"""Arithmetic word problems (GSM8K's form): the working, then `#### n`. Answers are compared by their number."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from ..metrics import Scores
from .base import Task

_NUMBER = r"[+-]?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_MARKED = re.compile(r"####[ \t]*\$?(" + _NUMBER + ")")
_ANYWHERE = re.compile(r"(?:(?<![\w.)])[+-])?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")


def gsm8k_number(text: str) -> str | None:
    """Return the answer in a solution: the first number after `####`, else the last number of the text.

    Equal numbers give equal strings: no commas, currency sign, plus, leading zeros, or trailing zeros after the point.
    None if there is no number.
    """
    marked = _MARKED.search(text)
    if marked:
        return _plain_number(marked.group(1))
    found = _ANYWHERE.findall(text)
    return _plain_number(found[-1]) if found else None


def _plain_number(text: str) -> str:
    digits = text.replace(",", "").replace("$", "").lstrip("+-")
    whole, _, fraction = digits.partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return "-" + value if text.startswith("-") and value != "0" else value


def exact_match_gsm8k(predictions: Sequence[str], references: Sequence[str]) -> Scores:
    """Return 1 where the numbers of prediction and reference are equal, else 0; [n].

    Without a number the score is 0.
    """
    numbers = ((gsm8k_number(p), gsm8k_number(r)) for p, r in zip(predictions, references, strict=True))
    return np.array([float(p is not None and p == r) for p, r in numbers], dtype=np.float64)


def _fault(answer: str) -> str | None:
    return "holds no number to compare with" if gsm8k_number(answer) is None else None


GSM8K = Task(
    name="gsm8k",
    input_field="question",
    answer_field="answer",
    lead="Question: ",
    cue="\nAnswer:",
    metrics=("exact_match",),
    score=lambda predictions, references: {"exact_match": exact_match_gsm8k(predictions, references)},
    higher_is_better=True,
    score_range=1.0,
    max_new_tokens=256,
    stop=("\n\n", "\nQuestion:"),
    answer_fault=_fault,
)
