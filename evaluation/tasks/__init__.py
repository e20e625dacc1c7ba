"""The supported tasks, by name and by the fields of their items."""

from __future__ import annotations

from collections.abc import Iterable

from moec.manifests.errors import DataError, OptionError

from .base import HiddenAnswer, Item, Task
from .choices import HELLASWAG, MMLU, PIQA, TRUTHFULQA, WINOGRANDE
from .gsm8k import GSM8K
from .perplexity import PERPLEXITY
from .summaries import SAMSUM, XSUM

__all__ = ["TASKS", "HiddenAnswer", "Item", "Task", "find_task", "infer_task"]

_ALL = (GSM8K, SAMSUM, XSUM, PERPLEXITY, HELLASWAG, PIQA, WINOGRANDE, MMLU, TRUTHFULQA)
TASKS: dict[str, Task] = {task.name: task for task in _ALL}


def _known() -> str:
    return ", ".join(f"{task.name} ({', '.join(task.row_fields)})" for task in TASKS.values())


def find_task(name: str) -> Task:
    """Return the task with this name. Raises OptionError."""
    if name not in TASKS:
        raise OptionError(f"task `{name}` is not known", f"the tasks and their fields are {_known()}")
    return TASKS[name]


def infer_task(fields: Iterable[str], place: str) -> Task:
    """Return the task whose fields are all among `fields`. A task with question and answer is preferred to plain text.

    place: file and line of the fields, for the message.
    Raises DataError if no task or several tasks fit.
    """
    present = set(fields)
    fits = [task for task in TASKS.values() if present.issuperset(task.row_fields)]
    most = max((len(task.row_fields) for task in fits), default=0)
    best = [task for task in fits if len(task.row_fields) == most]
    if len(best) == 1:
        return best[0]
    found = ", ".join(f"`{name}`" for name in sorted(present)[:10]) or "none"
    if not best:
        raise DataError(
            f"{place}: expected the fields of a known task, found {found}",
            f"rename the fields; the tasks and their fields are {_known()}",
        )
    names = " and ".join(task.name for task in best)
    raise DataError(f"{place}: the fields {found} fit the tasks {names}", "choose one with `--task`")
