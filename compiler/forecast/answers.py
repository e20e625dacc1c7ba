"""How many tokens it takes to measure tasks, if answers become as long as the data's: what nobody can know before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moec.evaluation.data import SplitData
from moec.evaluation.tasks import Item, Task
from moec.evaluation.text_pairs import encode_pairs

from ..preparation import Prepared
from ..tokenizer import load_tokenizer

SAMPLE_ITEMS = 256
"""Items that are counted of each task; the others are taken to be as long."""
ROWS_PER_STEP = 64
"""Answers that are decoded side by side, by the reference model and by the runtime of a certificate."""


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """Of one part of all tasks. read: tokens of prompts with their answers, or with each of given answers, which pass
    the model together; decoded: of answers that are generated.
    """

    read: float = 0.0
    decoded: float = 0.0

    def __add__(self, other: AnswerTokens) -> AnswerTokens:
        return AnswerTokens(self.read + other.read, self.decoded + other.decoded)


def count_answers(prepared: Prepared) -> tuple[AnswerTokens, AnswerTokens]:
    """Of the validation and of the test items of all tasks."""
    validation = test = AnswerTokens()
    for split in prepared.splits:
        shots = prepared.shots[split.task.name]
        validation += _count(prepared, split, split.validation.items, shots)
        test += _count(prepared, split, split.test.items, shots)
    return validation, test


def _count(prepared: Prepared, split: SplitData, items: Sequence[Item], shots: Sequence[Item]) -> AnswerTokens:
    task, sample = split.task, items[:SAMPLE_ITEMS]
    texts = [text for item in sample for text in _texts(task, item, shots)]
    pairs = encode_pairs(load_tokenizer(prepared.checkpoint.root), texts)
    context = prepared.lowering.model.original_positions
    read = sum(min(len(prompt) + len(answer), context) for prompt, answer in pairs)
    is_generated = task.answer_field is not None and task.choices is None
    decoded = sum(len(answer) for _, answer in pairs) if is_generated else 0
    scale = len(items) / max(len(sample), 1)
    return AnswerTokens(scale * read, scale * decoded)


def _texts(task: Task, item: Item, shots: Sequence[Item]) -> list[tuple[str, str]]:
    if task.choices is None:
        return [(task.prompt(item, shots), task.answer(item))]
    choices, _ = task.choices(item)
    return list(choices)
