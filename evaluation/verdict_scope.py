"""The tasks for which a verdict of quality.json holds, and the answers that a limit cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_VERDICTS = ("supported", "met", "missed", "refuted")


def verdict_scope(quality: Mapping[str, Any] | None) -> str:
    """Return for which tasks the verdict of quality.json holds: `supported for gsm8k; other tasks were not measured`.

    It names whether the model thinks, and the answers that ended at a limit of tokens, if there are any.
    Empty without a verdict on a target, without a measured task, or for an object of another form.
    """
    if not quality or quality.get("verdict") not in _VERDICTS:
        return ""
    measured = [quality.get(name) for name in ("tasks", "held_out_kl")]
    tasks = {name: task for names in measured if isinstance(names, Mapping) for name, task in names.items()}
    if not tasks:
        return ""
    names = [name + _thinking(tasks[name]) for name in sorted(tasks)]
    cut = "".join(_cut(name, tasks[name]) for name in sorted(tasks))
    return f"{quality['verdict']} for {', '.join(names)}; other tasks were not measured{cut}"


def _thinking(task: Any) -> str:
    settings = task.get("settings") if isinstance(task, Mapping) else None
    thinking = settings.get("thinking") if isinstance(settings, Mapping) else None
    return f" with thinking {thinking}" if thinking in ("on", "off") else ""


def _cut(name: str, task: Any) -> str:
    cut = task.get("cut") if isinstance(task, Mapping) else None
    if not isinstance(cut, Mapping):
        return ""
    counts = cut.get("value"), cut.get("baseline"), task.get("n"), task.get("max_new_tokens")
    if not all(isinstance(count, int) for count in counts) or not any(counts[:2]):
        return ""
    ours, baseline, n, limit = counts
    return f"; {ours} of {n} answers of {name} were cut at {limit} tokens, and {baseline} of the checkpoint's"
