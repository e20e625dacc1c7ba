"""Share and time left of a whole compile, from its forecast and the time that its stages really take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

TASKS = "measuring the tasks"
_BARS = {
    "measuring the checkpoint": TASKS,
    "baseline on": TASKS,
    "bundle on": TASKS,
    "writing a bundle": TASKS,
    "KL on": "KL on",
}
"""Stage of a bar that has another title, by the beginning of the title."""
_REPEATED = (TASKS, "measuring plans by their KL", "comparing with uniform formats and EdgeMoE")
"""Stages of many bars. The time left is that of the forecast, and not that of the present bar."""
TRUSTED_SHARE = 0.1
"""Share of a bar from which on it tells the time left. Before, the forecast counts: answers side by side end late."""


class WholeCompile:
    """Time of the stages of a compile.

    forecast: seconds of each stage, in order.
    """

    def __init__(self, forecast: Mapping[str, float]) -> None:
        self._forecast, self._order = dict(forecast), list(forecast)
        self._spent = dict.fromkeys(forecast, 0.0)
        self._ended = set[str]()

    def begun(self, title: str) -> Callable[[float, float], tuple[float, float]] | None:
        """Return what gives share and seconds left of the whole while a bar runs; None if no stage has this title.

        Stages before that of the bar have ended, or an earlier run has their results. Tasks are measured in between.
        """
        stage = self._stage(title)
        if stage is None:
            return None
        if stage != TASKS:
            self._ended.update(self._order[: self._order.index(stage)])
            self._ended.discard(stage)
        return partial(self._state, stage)

    def ended(self, title: str, seconds: float) -> None:
        """Add the time of a bar to its stage."""
        stage = self._stage(title)
        if stage is not None:
            self._spent[stage] += seconds

    def _stage(self, title: str) -> str | None:
        for start, stage in _BARS.items():
            if title.startswith(start):
                return next((name for name in self._order if name.startswith(stage)), None)
        return title if title in self._forecast else None

    def _state(self, stage: str, share: float, seconds: float) -> tuple[float, float]:
        """Return the share of the whole and the seconds left.

        share, seconds: of the present bar.
        """
        pace, passed, left = self._pace(), 0.0, 0.0
        for name, foreseen in self._forecast.items():
            spent = self._spent[name] + (seconds if name == stage else 0.0)
            rest = 0.0 if name in self._ended else max(0.0, pace * foreseen - spent)
            if name == stage and share > 0:
                trust = min(1.0, (share / TRUSTED_SHARE) ** 2)
                by_bar = trust * seconds * (1 - share) / share + (1 - trust) * rest
                rest = max(rest, by_bar) if name in _REPEATED else by_bar
            passed += spent or (pace * foreseen if name in self._ended else 0.0)
            left += rest
        return passed / max(passed + left, 1e-9), left

    def _pace(self) -> float:
        """Return how much longer than foreseen the stages took that this run has finished."""
        measured = [name for name in self._ended if self._spent[name]]
        foreseen = sum(self._forecast[name] for name in measured)
        return sum(self._spent[name] for name in measured) / foreseen if foreseen else 1.0
