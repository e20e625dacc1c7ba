"""Energy of a predicted token, by the power draw that a device profile states."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moec.profiles.device_parts import Power
    from moec.runtime.simulation.timeline import Timeline


def token_joules(power: Power | None, timeline: Timeline) -> float | None:
    """Return the joules of a decoded token; None if the profile states no draw, or no token was decoded."""
    from moec.profiles.predict import predicted_joules

    if power is None or timeline.tpot_mean_ns is None:
        return None
    return predicted_joules(power, timeline.tpot_mean_ns, timeline.stall, timeline.cooperation is not None)


def joules_text(joules: float | None) -> str:
    """Return an energy as text for people."""
    if joules is None:
        return "-"
    return f"{joules:.2f} J" if joules >= 1 else f"{joules * 1e3:.1f} mJ"


def power_text(power: Power, uses_gpu: bool) -> str | None:
    """Return the stated draws that the energy counts; None if one that is needed is not stated."""
    if power.load_watts is None or (uses_gpu and power.gpu_watts is None):
        return None
    parts = [f"{power.load_watts:g} W computing"]
    if power.idle_watts is not None:
        parts.append(f"{power.idle_watts:g} W waiting")
    if uses_gpu:
        parts.append(f"{power.gpu_watts:g} W of the GPU")
    return f"{', '.join(parts)}, as the profile states"
