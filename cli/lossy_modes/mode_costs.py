"""What the lossy modes of a run were measured to cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..terminal import output

if TYPE_CHECKING:
    from moec.runtime.engine.engine import Engine


def say_mode_cost(bundle: Path, engine: Engine) -> None:
    """Tell people what the modes of a run were measured to cost; nothing of a lossless run."""
    if (cost := mode_cost(bundle, engine)) is not None:
        output.say(cost)


def mode_cost(bundle: Path, engine: Engine) -> str | None:
    """What the modes of a run were measured to cost, in one line; None for a lossless run."""
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
    """A warning behind other text: of a flat router, every mode costs more than the ranks of what it changes tell."""
    from moec.runtime.modes.choice import FLAT_SHARE

    if not isinstance(share, float) or share <= FLAT_SHARE:
        return ""
    return f"; the router is flat{where}: the lower half of its choice has {share:.0%} of the weight"


def loss_text(loss: dict[str, Any]) -> str:
    """A loss and its interval, where there is one."""
    low, high = loss["interval95"]
    bounds = "" if low is None or high is None else f" ({low:.2%} to {high:.2%})"
    return f"{loss['loss']:.2%}{bounds}"
