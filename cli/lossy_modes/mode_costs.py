"""Measured cost of the lossy modes of a run, and modes that an exact run could take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..options.profile_defaults import device_run
from ..terminal import output

if TYPE_CHECKING:
    from moec.runtime.engine.engine import Engine


SUGGESTED_LOSS = 0.01
"""Largest measured loss of a suggestion: a share of the score."""
LEAST_SAVED = 0.01
"""Least share of the bytes of missed experts that a suggestion leaves unread."""


def say_mode_cost(bundle: Path, engine: Engine) -> None:
    """Print the measured cost of the modes of a run. Of an exact run print the modes that its device could use."""
    sentence = mode_cost(bundle, engine) or suggestion(bundle, engine)
    if sentence is not None:
        output.say(sentence)


def suggestion(bundle: Path, engine: Engine) -> str | None:
    """Return measured thresholds of dynamic precision that an exact run could take, as one line.

    None with an accelerator. None unless the profile of the bundle applies, and storage is predicted to take longer
    than computing. None without thresholds that were measured to lose at most SUGGESTED_LOSS and to save LEAST_SAVED.
    """
    from moec.manifests.hobbit_thresholds import best_thresholds, saved_share
    from moec.runtime.tuning.mode_records import low_bytes_share, measured_rows, modes_of_row

    from ..measuring.ceiling import predict

    run = device_run()
    if run is None or not run.applies or not engine.is_exact or engine.accelerator is not None:
        return None
    low = low_bytes_share(engine.bundle.manifest)
    row = best_thresholds(measured_rows(bundle), SUGGESTED_LOSS, low)
    if row is None:
        return None
    ceiling = predict(engine.bundle, run.profile, engine.memory.cache_bytes)
    if ceiling["storage_ns"] <= ceiling["compute_ns"]:
        return None
    missed = row["decisions"].get("missed_share")
    if not isinstance(missed, int | float) or not 0 < missed <= 1:
        return None
    saved = saved_share(row, low) / missed
    if saved < LEAST_SAVED:
        return None
    run.suggestion = f"--lossy '{modes_of_row(row).to_text()}'"
    return (
        f"suggestion: {run.suggestion} reads {saved:.0%} less of missed experts, at a measured loss of "
        f"{loss_text(row['loss'])} of {row['task']} on {row['n']} items, cache {row['expert_cache']}"
    )


def mode_cost(bundle: Path, engine: Engine) -> str | None:
    """Return the measured cost of the modes of a run as one line, or None for an exact run."""
    from moec.runtime.tuning.mode_records import calibrated_lower_half, measured_rows

    modes = engine.options.modes
    if modes.is_exact:
        return None
    row = next((row for row in measured_rows(bundle) if row["mode"] == modes.to_text()), None)
    if row is None:
        flat = _flatness(calibrated_lower_half(bundle), " on calibration data") if modes.decides else ""
        setting = "sweep" if modes.expert_activations is None else f'"{modes.to_text()}"'
        return f"its cost was not measured: moec eval BUNDLE --data DATA --modes {setting}{flat}"
    flat = _flatness((row["decisions"] or {}).get("lower_half_share"))
    return (
        f"measured to cost {loss_text(row['loss'])} of {row['task']} on {row['n']} items, "
        f"cache {row['expert_cache']}, {row['cache_state']} start{flat}"
    )


def _flatness(share: object, where: str = "") -> str:
    """Return a warning for a flat router, to append to another text. Otherwise return an empty text.

    share: weight share of the lower-ranked half of a token's experts. With a large share every mode costs more.
    """
    from moec.runtime.modes.mode_counts import FLAT_SHARE

    if not isinstance(share, float) or share <= FLAT_SHARE:
        return ""
    return f"; the router is flat{where}: the lower half of its choice has {share:.0%} of the weight"


def loss_text(loss: dict[str, Any]) -> str:
    """Return a loss as text, with its interval if there is one."""
    low, high = loss["interval95"]
    bounds = "" if low is None or high is None else f" ({low:.2%} to {high:.2%})"
    return f"{loss['loss']:.2%}{bounds}"
