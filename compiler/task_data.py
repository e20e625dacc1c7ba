"""The items of a compile's tasks: their splits, cut to size, and the solved examples in front of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from moec.evaluation.data import SplitData, load_splits
from moec.evaluation.tasks import Item
from moec.manifests.errors import OptionError

from .options import CompileOptions


def load_tasks(
    data: str, options: CompileOptions, note: Callable[[str], None]
) -> tuple[tuple[SplitData, ...], dict[str, tuple[Item, ...]]]:
    """Splits of every task, and solved examples by task name. Raises DataError, OptionError."""
    names: Sequence[str | None] = options.tasks or (None,)
    splits = tuple(_limited(load_splits(data, name), options) for name in names)
    shots: dict[str, tuple[Item, ...]] = {}
    for split in splits:
        examples = split.train.limit(options.shots, options.seed).items if options.shots else ()
        if len(examples) < options.shots:
            raise OptionError(f"`{data}` has {len(examples)} train items for {options.shots} shots", "lower `--shots`")
        split.task.prompt(split.test.items[0], examples)  # refuses shots where the task has no prompt
        shots[split.task.name] = examples
        if split.repeated:
            note(f"{split.task.name}: {split.repeated} repeated items are used in one split only")
    return splits, shots


def _limited(splits: SplitData, options: CompileOptions) -> SplitData:
    if options.limit is None:
        return splits
    cut = {name: getattr(splits, name).limit(options.limit, options.seed) for name in ("train", "validation", "test")}
    return replace(splits, **cut)
