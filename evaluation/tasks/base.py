"""Parts of a task: fields, prompt, answer, and the scoring of answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moec.manifests.errors import OptionError
from moec.manifests.thinking import after_thinking

from .answer_text import AnswerText
from .prompt_forms import ChatForm, Example, PromptForm

Item = Mapping[str, str]
"""One example: only the task's fields."""
Choices = tuple[list[tuple[str, str]], int]
"""(prompt, continuation) of every answer, and the index of the right answer."""
Scorer = Callable[[Sequence[str], Sequence[str]], dict[str, NDArray[np.float64]]]
"""(predictions, references) -> score of each item [n], by metric."""
PLACE = re.compile(r"\{(\w+)\}")


class HiddenAnswer(ValueError):
    """A row of a set whose right answers are not public, as in many test splits on the hub."""


def places(template: str) -> tuple[str, ...]:
    """Return the names in `{...}`, each once, in order."""
    return tuple(dict.fromkeys(PLACE.findall(template)))


@dataclass(frozen=True)
class Task:
    """A kind of item, its prompt and its metrics.

    template: the prompt without solved examples; `{NAME}` is the text of a field.
    answer_field: None means that there is no prompt; the first field of the template is scored.
    metrics: names; a loss target applies to `metrics[0]`.
    score: None means that the answer is scored by teacher forcing.
    score_range: largest difference between two scores of one item; None without a limit.
    separator: text between the prompt and its answer.
    answer_text: the part of a generated answer that is compared.
    choices: returns the given answers of an item. The likeliest one is the prediction.
    read: converts a raw row to an item, for data sets with a form of their own; None otherwise.
    raw_fields: fields of such a row.
    document_field: field of a text whose end may be cut if it is too long; None: nothing may be cut.
    form: how prompts are made instead, such as by a chat template; None: the task's own form.
    thinking: whether the model thinks before it answers; None: as its chat template does by itself.
    settings: what differs from the task's own definition, for records and digests.

    read raises ValueError with the error in the row, and HiddenAnswer if the right answer is not given.
    """

    name: str
    template: str
    answer_field: str | None
    metrics: tuple[str, ...]
    score: Scorer | None
    higher_is_better: bool
    score_range: float | None
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    separator: str = " "
    answer_text: AnswerText | None = None
    choices: Callable[[Item], Choices] | None = None
    read: Callable[[Mapping[str, object]], Item] | None = None
    raw_fields: tuple[str, ...] = ()
    document_field: str | None = None
    form: PromptForm | None = None
    thinking: bool | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def metric(self) -> str:
        """The primary metric."""
        return self.metrics[0]

    @property
    def is_perplexity(self) -> bool:
        """True if one text of each item is scored by teacher forcing."""
        return self.score is None and self.choices is None

    @property
    def input_fields(self) -> tuple[str, ...]:
        """Fields of the prompt, or of the scored text."""
        return places(self.template)

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of an item; each is text."""
        answer = () if self.answer_field is None else (self.answer_field,)
        return (*self.input_fields, *answer, *(("choices",) if self.choices is not None else ()))

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
        return self._prompt_after(shots, self._question(item), item)

    def answer(self, item: Item) -> str:
        """Return the reference continuation of `prompt`, with the separator before it."""
        return self.reference(item) if self.answer_field is None else self.continuation(self.reference(item))

    def continuation(self, answer: str) -> str:
        """Return an answer as it follows the prompt, with the separator before it."""
        return (self.separator if self.form is None else self.form.separator) + answer

    def reference(self, item: Item) -> str:
        """Return the reference that predictions are scored against."""
        return item[self.answer_field or self.input_fields[0]]

    def given_answers(self, item: Item, shots: Sequence[Item] = ()) -> Choices:
        """Return prompt and continuation of each given answer, after solved `shots`, and the index of the right one."""
        if self.choices is None:
            raise AssertionError("a task of choices has them")
        pairs, right = self.choices(item)
        if self.form is None:
            return [(self._prompt_after(shots, prompt, item), answer) for prompt, answer in pairs], right
        question = self.input_fields[0]
        return [
            (self._prompt_after(shots, prompt, {**item, question: prompt}), self.continuation(answer.strip()))
            for prompt, answer in pairs
        ], right

    def answer_fault(self, item: Item) -> str | None:
        """Return the error in the reference answer of an item, or None."""
        return None if self.answer_text is None else self.answer_text.fault(self.reference(item))

    def cut(self, text: str) -> str:
        """Return the prediction in a continuation: the text before the first stop text, without outer white space."""
        ends = [at for at in (text.find(stop) for stop in self.stop) if at >= 0]
        return text[: min(ends, default=len(text))].strip()

    def without_thought(self, prompt: str, text: str) -> str:
        """Return the part of a continuation that is scored: what follows the thought of a chat."""
        is_thought_known = isinstance(self.form, ChatForm) and self.form.thinks
        return after_thinking(prompt, text) if is_thought_known else text

    def _prompt_after(self, shots: Sequence[Item], question: str, item: Item) -> str:
        """Return the prompt of a question after solved shots."""
        if self.form is None:
            solved = [f"{self._question(shot)}{self.answer(shot)}\n\n" for shot in shots]
            return "".join(solved) + question
        solved_examples = [Example(self._question(shot), self.reference(shot), shot) for shot in shots]
        return self.form.prompt(solved_examples, Example(question, "", item))

    def _question(self, item: Item) -> str:
        return PLACE.sub(lambda place: item[place.group(1)], self.template)
