"""What every task is made of: fields, prompt, answer, and how answers are scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moec.manifests.errors import OptionError

Item = Mapping[str, str]
"""One example: the task's fields, nothing else."""
Choices = tuple[list[tuple[str, str]], int]
"""(prompt, continuation) of every answer, and which one is right."""
Scorer = Callable[[Sequence[str], Sequence[str]], dict[str, NDArray[np.float64]]]
"""(predictions, references) -> per metric the score of each item [n]."""


class HiddenAnswer(ValueError):
    """A row of a set whose right answers are not public, as those of many test splits on the hub."""


def no_fault(answer: str) -> str | None:
    """Accept every reference answer."""
    return None


@dataclass(frozen=True)
class Task:
    """A kind of item, its prompt and its metrics (`metrics[0]` is the one that a loss target speaks of).

    A prompt is `lead + input + cue`; the answer follows after one space. answer_field None: there is no prompt, the
    input itself is scored by teacher forcing, and `score` is None.
    score_range: largest difference between two scores of one item, None where there is no bound.
    answer_fault: says what is wrong with a reference answer, or None.
    choices: a task of several given answers, the likeliest of which is the prediction. read: turns a raw row into an
    item, where data sets have a form of their own; raises ValueError saying what is wrong, HiddenAnswer where the right
    answer is not told. raw_fields: of such a row.
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

    @property
    def metric(self) -> str:
        """The primary metric."""
        return self.metrics[0]

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of an item; each is text."""
        if self.answer_field is None:
            return (self.input_field,)
        return (self.input_field, self.answer_field, *(("choices",) if self.choices is not None else ()))

    @property
    def row_fields(self) -> tuple[str, ...]:
        """The fields that a row of a data set must have."""
        return self.raw_fields or self.fields

    def prompt(self, item: Item, shots: Sequence[Item] = ()) -> str:
        """The text the model continues: solved `shots`, then the item, a blank line between them.

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
        """The reference continuation of `prompt`, its first space included."""
        return item[self.input_field] if self.answer_field is None else " " + item[self.answer_field]

    def reference(self, item: Item) -> str:
        """The reference that predictions are scored against."""
        return item[self.answer_field or self.input_field]

    def cut(self, text: str) -> str:
        """The prediction in a continuation: up to the first stop text, outer white space removed."""
        ends = [at for at in (text.find(stop) for stop in self.stop) if at >= 0]
        return text[: min(ends, default=len(text))].strip()

    def _question(self, item: Item) -> str:
        return f"{self.lead}{item[self.input_field]}{self.cue}"
