"""Scales of a chart: values to pixels, and the ticks that people read easily."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_TICKS = 6
"""Most ticks that a linear scale aims at."""


@dataclass(frozen=True, slots=True)
class Scale:
    """One axis.

    low, high: values at its ends, low < high; positive for a logarithmic scale.
    label: title of the axis, with the unit.
    text: returns the text of a value at a tick.
    unit: ticks are round multiples of it, as 2^20 for MiB.
    """

    low: float
    high: float
    label: str
    text: Callable[[float], str]
    is_log: bool = False
    unit: float = 1.0

    def share(self, value: float) -> float:
        """Return the place of a value, 0 at the low end and 1 at the high end."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return the values that have a tick.

        A linear scale has multiples of 1, 2 or 5 times a power of ten. A logarithmic one has powers of ten, and
        multiples of them where fewer than three powers lie inside.
        """
        low, high = self.low / self.unit, self.high / self.unit
        if not self.is_log:
            raw = (high - low) / _TICKS
            power = 10.0 ** math.floor(math.log10(raw))
            step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
            first = math.ceil(low / step - 1e-9)
            count = math.floor(high / step + 1e-9) - first + 1
            return [(first + number) * step * self.unit for number in range(count)]
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        inside = list[float]()
        for factors in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
            multiples = [factor * 10.0**power for power in powers for factor in factors]
            inside = [tick * self.unit for tick in multiples if low <= tick <= high]
            if len(inside) >= 3:
                break
        return inside


def scale_of(
    values: list[float],
    label: str,
    text: Callable[[float], str],
    is_log: bool = False,
    from_zero: bool = False,
    unit: float = 1.0,
) -> Scale:
    """Return a scale that holds all values with a margin.

    values: at least one; a logarithmic scale leaves out those that are not positive.
    from_zero: whether a linear scale contains 0.
    unit: ticks are round multiples of it.
    """
    if is_log:
        positive = [value for value in values if value > 0] or [1.0]
        low, high = min(positive) / 1.15, max(positive) * 1.15
        return Scale(low, high, label, text, is_log=True, unit=unit)
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.06 * (high - low) or abs(high) * 0.06 or 1.0
    return Scale(low - margin if low < 0 or not from_zero else low, high + margin, label, text, unit=unit)
