"""Arithmetic word problems (GSM8K's form): the working, then `#### n`."""

from __future__ import annotations

from ..metrics import exact_match_gsm8k, gsm8k_number
from .base import Task


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
