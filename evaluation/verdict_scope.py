"""The tasks for which a verdict of quality.json holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_VERDICTS = ("supported", "met", "missed", "refuted")


def verdict_scope(quality: Mapping[str, Any] | None) -> str:
    """Return for which tasks the verdict of quality.json holds: `supported for gsm8k; other tasks were not measured`.

    Empty without a verdict on a target, or without a measured task.
    """
    if not quality or quality["verdict"] not in _VERDICTS:
        return ""
    tasks = sorted({*quality["tasks"], *quality.get("held_out_kl", {})})
    return f"{quality['verdict']} for {', '.join(tasks)}; other tasks were not measured" if tasks else ""
