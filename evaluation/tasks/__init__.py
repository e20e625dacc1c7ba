"""The supported tasks, by name and by the fields of their items."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moec.manifests.errors import DataError, OptionError

from .base import PLACE, HiddenAnswer, Item, Task
from .choices import HELLASWAG, MMLU, PIQA, TRUTHFULQA, WINOGRANDE
from .task_files import SUFFIX, own_task, read_task_file

__all__ = ["TASKS", "HiddenAnswer", "Item", "Task", "find_task", "infer_task", "task_name"]

_FILES = tuple(own_task(name) for name in ("gsm8k", "samsum", "xsum", "perplexity", "humaneval"))
_ALL = (*_FILES, HELLASWAG, PIQA, WINOGRANDE, MMLU, TRUTHFULQA)
_SHOWN_CHARACTERS = 80
_ANSWERS = ("answer", "label", "target", "output", "response", "completion", "reference", "summary")
TASKS: dict[str, Task] = {task.name: task for task in _ALL}


def _known() -> str:
    return ", ".join(f"{task.name} ({', '.join(task.row_fields)})" for task in TASKS.values())


def find_task(name: str, trusts_code: bool = False) -> Task:
    """Return the task with this name, or the task of a TOML file.

    trusts_code: whether the code of a metric in the file may run.
    Raises OptionError, and InputError for a file that is no task.
    """
    if name.endswith(SUFFIX):
        return read_task_file(Path(name), trusts_code)
    if name not in TASKS:
        raise OptionError(
            f"task `{name}` is not known", f"give a task file `NAME.toml`; the tasks and their fields are {_known()}"
        )
    return TASKS[name]


def task_name(name: str) -> str:
    """Return the name of a task that is given by its name or its file."""
    return Path(name).stem if name.endswith(SUFFIX) else name


def _task_lines(row: Mapping[str, object]) -> list[str]:
    """Return the lines of a task file for rows like this one; none if no prompt can name its fields.

    The answer is a field with a usual name, else the last text. The prompt has the longest of the others.
    """
    texts = {name: text for name, text in row.items() if isinstance(text, str)}
    usable = [name for name in texts if PLACE.fullmatch(f"{{{name}}}")]
    if len(usable) < 2:
        return [f'prompt = "{{{usable[0]}}}"', 'metric = "perplexity"'] if usable else []
    answer = next((name for name in usable if name.lower() in _ANSWERS), usable[-1])
    question = max((name for name in usable if name != answer), key=lambda name: len(texts[name]))
    return [
        f'prompt = "{{{question}}}\\nAnswer:"',
        f'answer = "{answer}"',
        'stop = ["\\n"]',
        "max_new_tokens = 32",
    ]


def infer_task(row: Mapping[str, object], place: str) -> Task:
    """Return the task whose fields are all in a row. A task with question and answer is preferred to plain text.

    place: file and line of the row, for the message.
    Raises DataError if no task or several tasks fit.
    """
    fits = [task for task in TASKS.values() if row.keys() >= set(task.row_fields)]
    most = max((len(task.row_fields) for task in fits), default=0)
    best = [task for task in fits if len(task.row_fields) == most]
    if len(best) == 1:
        return best[0]
    fields = ", ".join(f"`{' '.join(name.split())[:_SHOWN_CHARACTERS]}`" for name in sorted(row)[:10]) or "none"
    if not best:
        lines = "".join(f"\n- {line}" for line in _task_lines(row))
        raise DataError(
            f"{place}: expected the fields of a known task, found {fields}"
            + (f"; a task file of these lines would do{lines}" if lines else ""),
            ("write them to `NAME.toml` and add `--task NAME.toml`, or " if lines else "")
            + f"rename the fields; the tasks and their fields are {_known()}",
        )
    names = " and ".join(task.name for task in best)
    raise DataError(f"{place}: the fields {fields} fit the tasks {names}", "choose one with `--task`")
