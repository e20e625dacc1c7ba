"""The items of all tasks of a compile, and the solved examples in their prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from moec.evaluation.data import SplitData, load_splits
from moec.evaluation.long_items import Context, fit_items
from moec.evaluation.tasks import Item, find_task
from moec.evaluation.tasks.task_settings import Templates
from moec.manifests.errors import OptionError

from .options import CompileOptions

Shots = Mapping[str, tuple[Item, ...]]
"""Solved examples by task name."""


def load_task_data(
    options: CompileOptions, note: Callable[[str], None], templates: Callable[[], Templates] | None = None
) -> tuple[tuple[SplitData, ...], Shots]:
    """Return splits and solved examples of every task. Both are empty without data.

    templates: opens the templates of prompts.
    Raises DataError, OptionError, InputError.
    """
    if options.data is None:
        return (), {}
    settings = options.task_settings
    change = partial(settings.apply, templates=templates)
    tasks = [find_task(name, settings.trusts_metric_code) for name in options.tasks]
    splits = tuple(_limited(load_splits(options.data, task, change), options) for task in tasks or (None,))
    shots = {}
    for split in splits:
        examples = split.train.limit(options.shots, options.seed).items if options.shots else ()
        if len(examples) < options.shots:
            raise OptionError(
                f"`{options.data}` has {len(examples)} train items for {options.shots} shots", "lower `--shots`"
            )
        split.task.prompt(split.test.items[0], examples)  # raises if the task has no prompt for shots
        shots[split.task.name] = examples
        for name in split.hidden:
            note(f"{split.task.name}: the split `{name}` hides its answers and is not used")
        used = ", ".join(f"{name} from `{items.source}` ({len(items):,} items)" for name, items in split.sets)
        note(f"{split.task.name}: {used}")
        if split.task.thinking is not None:
            thinking, most = split.task.settings["thinking"], split.task.max_new_tokens
            note(f"{split.task.name}: thinking is {thinking}, an answer has at most {most} tokens")
        if split.repeated:
            note(f"{split.task.name}: {split.repeated} repeated items are used in one split only")
    return splits, shots


def fit_splits(
    splits: Sequence[SplitData], shots: Shots, context: Context, policy: str, note: Callable[[str], None]
) -> tuple[SplitData, ...]:
    """Return the splits with validation and test items that fit a context.

    policy: see `evaluation/long_items.py`.
    Raises ContextOverflow, DataError.
    """
    fitted = []
    for split in splits:
        sets = {"validation": split.validation, "test": split.test}
        for name, items in sets.items():
            fitting = fit_items(split.task, items.items, shots[split.task.name], context, policy)
            for sentence in fitting.changes(context.tokens):
                note(f"{split.task.name}, {name}: {sentence}")
            sets[name] = replace(items, items=fitting.items)
        fitted.append(replace(split, validation=sets["validation"], test=sets["test"]))
    return tuple(fitted)


def train_texts(split: SplitData, shots: Shots) -> list[tuple[str, str]]:
    """Return prompts and answers of the train items of one task."""
    return texts_of(split, split.train.items, shots)


def texts_of(split: SplitData, items: Sequence[Item], shots: Shots) -> list[tuple[str, str]]:
    """Return prompts and answers of some items of one task."""
    examples = shots[split.task.name]
    return [(split.task.prompt(item, examples), split.task.answer(item)) for item in items]


def _limited(splits: SplitData, options: CompileOptions) -> SplitData:
    if options.limit is None:
        return splits
    train, validation, test = (items.limit(options.limit, options.seed) for _, items in splits.sets)
    return replace(splits, train=train, validation=validation, test=test)
