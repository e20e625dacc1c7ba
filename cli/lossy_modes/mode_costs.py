"""Measured cost of the lossy modes of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..terminal import output

if TYPE_CHECKING:
    from moec.runtime.engine.engine import Engine


def say_mode_cost(bundle: Path, engine: Engine) -> None:
    """Print the measured cost of the modes of a run. Print nothing for a lossless run."""
    if (cost := mode_cost(bundle, engine)) is not None:
        output.say(cost)


def mode_cost(bundle: Path, engine: Engine) -> str | None:
    """Return the measured cost of the modes of a run as one line, or None for a lossless run."""
    from moec.runtime.tuning.mode_records import calibrated_lower_half, measured_rows

    modes = engine.options.modes
    if modes.is_lossless:
        return None
    row = next((row for row in measured_rows(bundle) if row["mode"] == modes.to_text()), None)
    if row is None:
        flat = _flatness(calibrated_lower_half(bundle), " on calibration data")
        return f"its cost was not measured: moec eval BUNDLE --data DATA --modes sweep{flat}"
    return (
        f"measured to cost {loss_text(row['loss'])} of {row['task']} on {row['n']} items, "
        f"cache {row['expert_cache']}, {row['cache_state']} start{_flatness(row['decisions'].get('lower_half_share'))}"
    )


def _flatness(share: object, where: str = "") -> str:
    """Return a warning for a flat router, to append to another text. Otherwise return an empty text.

    share: weight share of the lower-ranked half of a token's experts. With a large share every mode costs more.
    """
    from moec.runtime.modes.choice import FLAT_SHARE

    if not isinstance(share, float) or share <= FLAT_SHARE:
        return ""
    return f"; the router is flat{where}: the lower half of its choice has {share:.0%} of the weight"


def loss_text(loss: dict[str, Any]) -> str:
    """Return a loss as text, with its interval if there is one."""
    low, high = loss["interval95"]
    bounds = "" if low is None or high is None else f" ({low:.2%} to {high:.2%})"
    return f"{loss['loss']:.2%}{bounds}"
