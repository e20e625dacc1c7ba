"""Number of tokens that the tasks need, if answers are as long as the data's. The real length is unknown beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moec.evaluation.data import SplitData
from moec.evaluation.tasks import Item
from moec.evaluation.text_pairs import encode_pairs

from ..checkpoint.tokenizer import load_tokenizer
from ..preflight.preparation import Prepared

SAMPLE_ITEMS = 256
"""Items of each task that are counted. The other items are assumed to have the same length."""


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """Tokens of one part of all tasks.

    read: tokens of prompts with their answers, or with each choice, which pass through the model together.
    answered: tokens of prompts with the right answer alone.
    decoded: tokens of generated answers.
    """

    read: float = 0.0
    answered: float = 0.0
    decoded: float = 0.0

    def __add__(self, other: AnswerTokens) -> AnswerTokens:
        parts = ("read", "answered", "decoded")
        return AnswerTokens(*(getattr(self, name) + getattr(other, name) for name in parts))


def count_answers(prepared: Prepared) -> tuple[AnswerTokens, AnswerTokens]:
    """Return the tokens of the validation items and of the test items of all tasks."""
    validation = test = AnswerTokens()
    for split in prepared.splits:
        shots = prepared.shots[split.task.name]
        validation += _count(prepared, split, split.validation.items, shots)
        test += _count(prepared, split, split.test.items, shots)
    return validation, test


def _count(prepared: Prepared, split: SplitData, items: Sequence[Item], shots: Sequence[Item]) -> AnswerTokens:
    task, sample = split.task, items[:SAMPLE_ITEMS]
    tokenizer, context = load_tokenizer(prepared.checkpoint.root), prepared.lowering.model.original_positions
    right = encode_pairs(tokenizer, [(task.prompt(item, shots), task.answer(item)) for item in sample])
    given = right
    if task.choices is not None:
        given = encode_pairs(tokenizer, [pair for item in sample for pair in task.given_answers(item, shots)[0]])
    read, answered = (sum(min(len(p) + len(a), context) for p, a in pairs) for pairs in (given, right))
    is_generated = task.score is not None
    decoded = sum(len(answer) for _, answer in right) if is_generated else 0
    scale = len(items) / max(len(sample), 1)
    return AnswerTokens(scale * read, scale * answered, scale * decoded)
