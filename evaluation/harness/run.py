"""Run tasks of lm-evaluation-harness on a model, and return plain results.

Local task files are searched first, and the harness's own list only if it is needed.
"""

from __future__ import annotations

import difflib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moec.manifests.errors import DataError, MoecError, OptionError

from ..metrics import load

PURPOSE = "lm-evaluation-harness"
EXTRA = "lm-eval"
_LISTED_NAMES = 8

if TYPE_CHECKING:
    from .language_model import BundleLM

BOOTSTRAP = 100_000
"""Resamples of a standard error that has no formula, as in the harness."""
_PYTHON_SEED, _NUMPY_SEED = 0, 1234
"""Seeds of the harness. Tasks may draw from these generators."""


@dataclass(frozen=True, slots=True)
class HarnessSettings:
    """Settings of all tasks of a run.

    limit: take the first items of each task; None for all.
    num_fewshot: solved examples before each item, except for tasks that fix them at 0; None for the tasks' own numbers.
    seed: seed of the choice of examples.

    chat: prompts are rendered by the model's chat template. Solved examples are earlier turns.
    system: the system message, or None.
    gen_kwargs: generation settings that replace those of the tasks.
    keeps_items: keep prompts, answers and scores of every item.
    Raises OptionError.
    """

    limit: int | None = None
    num_fewshot: int | None = None
    seed: int = _NUMPY_SEED
    chat: bool = False
    system: str | None = None
    gen_kwargs: Mapping[str, Any] = field(default_factory=dict)
    keeps_items: bool = False

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise OptionError(f"`--limit` must be at least 1, found {self.limit}", "leave it out for all items")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise OptionError(f"`--num-fewshot` must be 0 or more, found {self.num_fewshot}", "try 5")
        if self.system is not None and not self.chat:
            raise OptionError("`--system` has no effect without `--apply-chat-template`", "add it")

    def to_plain(self) -> dict[str, Any]:
        """Return the settings for the results."""
        return {
            "limit": self.limit,
            "num_fewshot": self.num_fewshot,
            "fewshot_seed": self.seed,
            "apply_chat_template": self.chat,
            "system_instruction": self.system,
            "gen_kwargs": dict(self.gen_kwargs),
            "bootstrap_iters": BOOTSTRAP,
        }


def parse_gen_kwargs(text: str | None) -> dict[str, Any]:
    """Return the settings in `name=value,name=value`. Raises OptionError, MissingDependency."""
    if not text:
        return {}
    parse = load("lm_eval.utils", PURPOSE, EXTRA).simple_parse_args_string
    try:
        settings: dict[str, Any] = parse(text)
    except (ValueError, IndexError) as error:
        raise OptionError(
            f"`--gen-kwargs {text[:60]}` are not settings", "write them like `temperature=0.7,max_gen_toks=64`"
        ) from error
    return settings


def run_tasks(tasks: Mapping[str, Any], model: BundleLM, settings: HarnessSettings) -> dict[str, Any]:
    """Return the results of the harness: `results`, `groups`, `configs`, `versions`, `n-shot`, ..., and `samples`.

    tasks: tasks and groups of `load_tasks`. Their settings are changed.
    Values are those of JSON: numbers that it does not have are None, and code is its text.
    Raises DataError if items, prompts or metrics of a task fail, and the errors of the engine.
    """
    for task in tasks["tasks"].values():
        if settings.gen_kwargs and task.get_config("output_type") == "generate_until":
            task.set_config(key="generation_kwargs", value=dict(settings.gen_kwargs), update=True)
        fixed = task.get_config("num_fewshot")
        if settings.num_fewshot is not None and fixed != 0:
            task.set_config(key="num_fewshot", value=settings.num_fewshot)
        elif fixed is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=settings.seed)
    random.seed(_PYTHON_SEED)
    np.random.seed(_NUMPY_SEED)
    evaluate = load("lm_eval.evaluator", PURPOSE, EXTRA).evaluate
    try:
        evaluated = evaluate(
            lm=model,
            task_dict=dict(tasks),
            limit=settings.limit,
            bootstrap_iters=BOOTSTRAP,
            log_samples=settings.keeps_items,
            system_instruction=settings.system,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
        )
    except MoecError:
        raise
    except (Exception, SystemExit) as error:  # a task's code may end the process, which would give no score and code 0
        if (model.is_working and not isinstance(error, SystemExit)) or isinstance(error, MemoryError):
            raise
        text = "" if isinstance(error, SystemExit) else str(error).strip()
        reason = (text or type(error).__name__).splitlines()[0]
        names = ", ".join(list(tasks["tasks"])[:8])
        raise DataError(f"the items of {names} could not be evaluated: {reason}", "check the task files") from error
    results: dict[str, Any] = plain(evaluated)
    return results


def plain(value: Any) -> Any:
    """Return a value in the forms of JSON."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple, set, frozenset, np.ndarray)):
        return [plain(inner) for inner in value]
    return str(value)


def score_rows(results: Mapping[str, Any]) -> Iterator[tuple[str, str, int | str, str, float | str, float | str]]:
    """Yield a row for each metric: task, filter, examples, metric, value, and standard error. Groups come after tasks.

    results: of `run_tasks`. A value that is missing is `-`.
    """
    shots = results.get("n-shot", {})
    for section in ("results", "groups"):
        for name, metrics in results.get(section, {}).items():
            if section == "results" and name in results.get("groups", {}):
                continue
            for key, value in metrics.items():
                metric, comma, filter_name = key.partition(",")
                if not comma or metric.endswith("_stderr"):
                    continue
                error = metrics.get(f"{metric}_stderr,{filter_name}")
                yield name, filter_name, shots.get(name, "-"), metric, _number(value), _number(error)


def _number(value: Any) -> float | str:
    return value if isinstance(value, float) else "-" if value in (None, "N/A") else str(value)


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
