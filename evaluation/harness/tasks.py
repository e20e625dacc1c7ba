"""Find and load tasks of lm-evaluation-harness: local task files first, and its own list only if it is needed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moec.manifests.errors import DataError, MoecError, OptionError

from ..optional import load

PURPOSE = "lm-evaluation-harness"
EXTRA = "lm-eval"
_LISTED_NAMES = 8


def load_tasks(names: Sequence[str], folder: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Return tasks and groups as the harness's `TaskManager.load` does. Their data are loaded, too.

    names: tasks, groups, tags, or paths of task files.
    folder: task files next to those of the harness, or None.
    say: called with sentences about slow steps.
    Raises MissingDependency, OptionError for a name that is not known, DataError for a task that cannot be loaded.
    """
    module = load("lm_eval.tasks", PURPOSE, EXTRA)
    if folder is not None and not folder.is_dir():
        raise OptionError(f"`--include-path {folder}` is not a folder", "name the folder of the task files")
    local = _manager(module, folder, has_own=False)
    if all(_is_known(local, name) for name in names):
        try:
            return _loaded(local, names)
        except KeyError:  # a local group may name tasks of the harness
            pass
    say("reading the task files of lm_eval")
    manager = _manager(module, folder, has_own=True)
    unknown = next((name for name in names if not _is_known(manager, name)), None)
    if unknown is not None:
        listed = local.all_tasks or manager.all_tasks
        near = difflib.get_close_matches(unknown, manager.all_tasks, n=3) or listed[:_LISTED_NAMES]
        raise OptionError(
            f"there is no task `{unknown[:80]}`",
            f"did you mean {', '.join(near)}? A folder of task files is named by `--include-path`"
            if near
            else "name the folder of its task file with `--include-path`",
        )
    try:
        return _loaded(manager, names)
    except KeyError as error:
        raise DataError(f"a task names one that is not known: {_reason(error)}", "check the task files") from error


def _manager(module: Any, folder: Path | None, has_own: bool) -> Any:
    return module.TaskManager(include_path=None if folder is None else str(folder), include_defaults=has_own)


def _is_known(manager: Any, name: str) -> bool:
    return name in manager.task_index or (name.endswith((".yaml", ".yml")) and Path(name).is_file())


def _loaded(manager: Any, names: Sequence[str]) -> dict[str, Any]:
    """Load tasks one after the other, so that an error names its task."""
    loaded: list[Any] = []
    for name in dict.fromkeys(names):
        try:
            listed = manager.load([name])
        except (MoecError, KeyError):
            raise
        except (Exception, SystemExit) as error:  # task files hold code, and their data come from anywhere
            raise DataError(
                f"the task `{name}` could not be loaded: {_reason(error)}",
                "check its task file; without a network, it needs local data: see docs/guides/measure-and-tune.md",
            ) from error
        loaded += listed.get("groups", {}).values() or listed["tasks"].values()
    try:
        tasks: dict[str, Any] = manager.load(loaded)
    except ValueError as error:
        raise OptionError(f"these tasks cannot run together: {_reason(error)}", "name each of them once") from error
    return tasks


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "SystemExit"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
