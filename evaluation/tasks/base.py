"""Parts of a task: fields, prompt, answer, and the scoring of answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moec.manifests.errors import OptionError

Item = Mapping[str, str]
"""One example: only the task's fields."""
Choices = tuple[list[tuple[str, str]], int]
"""(prompt, continuation) of every answer, and the index of the right answer."""
Scorer = Callable[[Sequence[str], Sequence[str]], dict[str, NDArray[np.float64]]]
"""(predictions, references) -> score of each item [n], by metric."""


class HiddenAnswer(ValueError):
    """A row of a set whose right answers are not public, as in many test splits on the hub."""


def no_fault(answer: str) -> str | None:
    """Accept every reference answer."""
    return None


@dataclass(frozen=True)
class Task:
    """A kind of item, its prompt and its metrics.

    metrics: names; a loss target applies to `metrics[0]`.
    answer_field: None means that there is no prompt, the input is scored by teacher forcing, and `score` is None.
    score_range: largest difference between two scores of one item; None without a limit.
    answer_fault: returns the error in a reference answer, or None.
    choices: returns the given answers of an item. The likeliest one is the prediction.
    read: converts a raw row to an item, for data sets with a form of their own; None otherwise.
    raw_fields: fields of such a row.
    document_field: field of a text whose end may be cut if it is too long; None: nothing may be cut.

    A prompt is `lead + input + cue`. The answer follows after one space.
    read raises ValueError with the error in the row, and HiddenAnswer if the right answer is not given.
    """

    name: str
    input_field: str
    answer_field: str | None
    lead: str
    cue: str
    metrics: tuple[str, ...]
    score: Scorer | None
    higher_is_better: bool
    score_range: float | None
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    answer_fault: Callable[[str], str | None] = no_fault
    choices: Callable[[Item], Choices] | None = None
    read: Callable[[Mapping[str, object]], Item] | None = None
    raw_fields: tuple[str, ...] = ()
    document_field: str | None = None

    @property
    def metric(self) -> str:
        """The primary metric."""
        return self.metrics[0]

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of an item; each is text."""
        if self.answer_field is None:
            return (self.input_field,)
        return (self.input_field, self.answer_field, *(("choices",) if self.choices is not None else ()))

    @property
    def row_fields(self) -> tuple[str, ...]:
        """Fields that a row of a data set must have."""
        return self.raw_fields or self.fields

    def prompt(self, item: Item, shots: Sequence[Item] = ()) -> str:
        """Return the text that the model continues: solved `shots`, then the item, separated by blank lines.

        Raises OptionError if there are shots and the task has no prompt.
        """
        if self.answer_field is None:
            if shots:
                raise OptionError(
                    f"task `{self.name}` scores plain text and takes no solved examples", "drop `--shots`"
                )
            return ""
        solved = [f"{self._question(shot)}{self.answer(shot)}\n\n" for shot in shots]
        return "".join(solved) + self._question(item)

    def answer(self, item: Item) -> str:
        """Return the reference continuation of `prompt`, with its leading space."""
        return item[self.input_field] if self.answer_field is None else " " + item[self.answer_field]

    def reference(self, item: Item) -> str:
        """Return the reference that predictions are scored against."""
        return item[self.answer_field or self.input_field]

    def cut(self, text: str) -> str:
        """Return the prediction in a continuation: the text before the first stop text, without outer white space."""
        ends = [at for at in (text.find(stop) for stop in self.stop) if at >= 0]
        return text[: min(ends, default=len(text))].strip()

    def _question(self, item: Item) -> str:
        return f"{self.lead}{item[self.input_field]}{self.cue}"
