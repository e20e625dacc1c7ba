"""Every plan that the search measured, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..text import nats_text, note, number, section, share_text, table

_MOST_ROWS = 1000


def trials_section(quality: Mapping[str, Any]) -> str:
    """Return the section with a table of all trials."""
    trials = quality["trials"]
    if not trials:
        return section("trials", "Every plan that was measured", note("None: the target named the formats."))
    rows = [_row(at, trial) for at, trial in enumerate(trials[:_MOST_ROWS], 1)]
    header = ("", "purpose", "expert bytes", "bits per weight", "KL", "loss", "items", "verdict")
    more = "" if len(trials) <= _MOST_ROWS else note(f"{len(trials) - _MOST_ROWS} further trials are in quality.json.")
    shown = f"<details><summary>{len(trials)} measurements</summary>{table(header, rows, 'trials')}{more}</details>"
    return section("trials", "Every plan that was measured", shown)


def _row(at: int, trial: Mapping[str, Any]) -> tuple[str, ...]:
    losses = list(trial["losses"].values())
    accepted = trial["accepted"]
    return (
        str(at),
        str(trial["purpose"]),
        f"{int(number(trial['expert_packed_bytes'])):,}",
        f"{number(trial['bits_per_weight']):.3f}",
        "" if trial["kl"] is None else nats_text(number(trial["kl"]["mean"])),
        ", ".join(share_text(number(loss["loss"])) for loss in losses),
        ", ".join(f"{int(number(loss['n'])):,}" for loss in losses),
        "" if accepted is None else "kept" if accepted else "refused",
    )
