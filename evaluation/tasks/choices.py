"""Tasks with several given answers, scored by the log-likelihood of each continuation.

An item has the prompt and the continuation of the right answer. `choices` is JSON with all answers: a list of
[prompt, continuation] and the index of the right one.
Prompts of HellaSwag, PIQA and WinoGrande follow EleutherAI's lm-evaluation-harness.
Prompts of MMLU lack its line with the subject, those of TruthfulQA its six solved questions at the beginning.
Rows are read in the forms of the sets on the hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from .base import PLACE, Choices, HiddenAnswer, Item, Task

Row = Mapping[str, object]
_LETTERS = "ABCDEFGHIJ"
_HIDDEN = (-1, "-1", "")
"""Values that sets on the hub have if the right answer is not public."""


def _item(pairs: Sequence[tuple[str, str]], right: int) -> Item:
    """Build an item from its answers. Raises ValueError."""
    if not 0 <= right < len(pairs):
        raise ValueError(f"names answer {right} of {len(pairs)}")
    if len(pairs) < 2 or any(not answer.strip() for _, answer in pairs):
        raise ValueError("needs two answers or more, none of them blank")
    prompt, answer = pairs[right]
    return {"question": prompt, "answer": answer.strip(), "choices": json.dumps([[list(p) for p in pairs], right])}


def choices_of(item: Item) -> Choices:
    """Return the answers of an item that `_item` made."""
    pairs, right = json.loads(item["choices"])
    return [(prompt, answer) for prompt, answer in pairs], int(right)


def listed_item(row: Row, prompt: str, options: str, answer: str, separator: str) -> Item:
    """Return the item of a row that lists its answers.

    prompt: text with `{NAME}` for fields of the row.
    options: field with the list of answers.
    answer: field with the right one: its place from 0, its letter, or its text.
    separator: text between prompt and answer.
    Raises ValueError, and HiddenAnswer if the right answer is not given.
    """
    texts, given = _texts(row, options), row[answer]
    filled = PLACE.sub(lambda place: _text(row, place.group(1)), prompt)
    if isinstance(given, str) and given in texts:
        right = texts.index(given)
    elif isinstance(given, str) and len(given) == 1 and given in _LETTERS:
        right = _LETTERS.index(given)
    else:
        right = _number(given, answer)
    return _item([(filled, separator + text.strip()) for text in texts], right)


def _text(row: Row, name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"has no text in `{name}`")
    return value


def _texts(row: Row, name: str) -> list[str]:
    value = row[name]
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"has no list of texts in `{name}`")
    return list(value)


def _number(value: object, name: str) -> int:
    if not isinstance(value, bool) and value in _HIDDEN:
        raise HiddenAnswer(f"hides its answer: `{name}` is {value!r}")
    if isinstance(value, bool) or not isinstance(value, (int, str)) or not re.fullmatch(r"\d{1,3}", str(value)):
        raise ValueError(f"has no number of an answer in `{name}`")
    return int(value)


def _tidy(text: str) -> str:
    """Remove the marks of their source from HellaSwag's texts."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _hellaswag(row: Row) -> Item:
    context = f"{_text(row, 'activity_label')}: {_text(row, 'ctx_a')} {_text(row, 'ctx_b').capitalize()}"
    pairs = [(_tidy(context), " " + _tidy(ending).strip()) for ending in _texts(row, "endings")]
    return _item(pairs, _number(row["label"], "label"))


def _piqa(row: Row) -> Item:
    prompt = f"Question: {_text(row, 'goal')}\nAnswer:"
    return _item(
        [(prompt, " " + _text(row, name).strip()) for name in ("sol1", "sol2")], _number(row["label"], "label")
    )


def _winogrande(row: Row) -> Item:
    before, gap, after = _text(row, "sentence").partition("_")
    if not gap:
        raise ValueError("has no `_` in `sentence`")
    options = [_text(row, name) for name in ("option1", "option2")]
    return _item([(before + option, " " + after.strip()) for option in options], _number(row["answer"], "answer") - 1)


def _mmlu(row: Row) -> Item:
    options, given = _texts(row, "choices"), row["answer"]
    right = (
        _LETTERS.index(given)
        if isinstance(given, str) and len(given) == 1 and given in _LETTERS
        else _number(given, "answer")
    )
    listed = "".join(f"\n{letter}. {option}" for letter, option in zip(_LETTERS, options, strict=False))
    prompt = f"{_text(row, 'question').strip()}{listed}\nAnswer:"
    return _item([(prompt, f" {letter}") for letter in _LETTERS[: len(options)]], right)


def _truthfulqa(row: Row) -> Item:
    targets = row["mc1_targets"]
    if not isinstance(targets, Mapping) or not {"choices", "labels"} <= set(targets):
        raise ValueError("has no `choices` and `labels` in `mc1_targets`")
    options, labels = _texts(targets, "choices"), targets["labels"]
    labels = list(labels) if isinstance(labels, (list, tuple)) else []
    if len(labels) != len(options) or any(label not in (0, 1) for label in labels) or labels.count(1) != 1:
        raise ValueError("marks other than one right answer in `labels`")
    prompt = f"Q: {_text(row, 'question')}\nA:"
    return _item([(prompt, " " + option.strip()) for option in options], labels.index(1))


def _task(name: str, fields: tuple[str, ...], read: Callable[[Row], Item], by_length: bool = False) -> Task:
    metrics = ("accuracy_by_length", "accuracy") if by_length else ("accuracy", "accuracy_by_length")
    return Task(
        name=name, template="{question}", answer_field="answer", metrics=metrics, score=None,
        higher_is_better=True, score_range=1.0, max_new_tokens=0, choices=choices_of, read=read, raw_fields=fields,
    )  # fmt: skip


HELLASWAG = _task("hellaswag", ("activity_label", "ctx_a", "ctx_b", "endings", "label"), _hellaswag, by_length=True)
PIQA = _task("piqa", ("goal", "sol1", "sol2", "label"), _piqa)
WINOGRANDE = _task("winogrande", ("sentence", "option1", "option2", "answer"), _winogrande)
MMLU = _task("mmlu", ("question", "choices", "answer"), _mmlu)
TRUTHFULQA = _task("truthfulqa", ("question", "mc1_targets"), _truthfulqa)
