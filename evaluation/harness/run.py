"""Run tasks of lm-evaluation-harness on a model, and return plain results."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from moec.manifests.errors import DataError, MoecError, OptionError

from ..optional import load
from .tasks import EXTRA, PURPOSE

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
