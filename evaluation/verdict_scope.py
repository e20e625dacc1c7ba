"""The tasks for which a verdict of quality.json holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_VERDICTS = ("supported", "met", "missed", "refuted")


def verdict_scope(quality: Mapping[str, Any] | None) -> str:
    """Return for which tasks the verdict of quality.json holds: `supported for gsm8k; other tasks were not measured`.

    Empty without a verdict on a target, without a measured task, or for an object of another form.
    """
    if not quality or quality.get("verdict") not in _VERDICTS:
        return ""
    measured = [quality.get(name) for name in ("tasks", "held_out_kl")]
    tasks = sorted({task for names in measured if isinstance(names, Mapping) for task in names})
    return f"{quality['verdict']} for {', '.join(tasks)}; other tasks were not measured" if tasks else ""
