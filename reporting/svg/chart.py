"""A chart with two axes: lines, marks with intervals, a level, and a legend.

Colours and fonts come from the style sheet of the page (`page/report.css`): series have the classes `s0` to `s6`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

WIDTH, HEIGHT = 760, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 26, 12, 46
_LEGEND_ROW = 18
_RADIUS = 4.0
Mark = Literal["dot", "ring", "diamond", "square", "cross"]
_TICKS = 6
"""Most ticks that a linear scale aims at."""


@dataclass(frozen=True, slots=True)
class Point:
    """One value.

    low, high: ends of its interval; None without one.
    title: text that is shown when the pointer rests on it.
    """

    x: float
    y: float
    title: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one kind.

    name: text of the legend; empty: not in the legend.
    colour: number of the colour, 0 to 6.
    mark: form of the points; None: no marks.
    is_line: whether a line connects the points, in the order of x.
    is_dashed: whether that line is dashed.
    """

    name: str
    points: Sequence[Point]
    colour: int
    mark: Mark | None = "dot"
    is_line: bool = False
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart.

    title: what it shows, for people who do not see it.
    level: a horizontal line as (value, text); None: no line.
    """

    title: str
    x: Scale
    y: Scale
    series: Sequence[Series]
    level: tuple[float, str] | None = None
    height: int = HEIGHT
    _named: list[Series] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_named", [series for series in self.series if series.name and series.points])

    def to_svg(self) -> str:
        body = [*self._grid(), *self._level()]
        for series in self.series:
            body += self._line(series) if series.is_line else []
            body += [element for point in series.points for element in self._point(series, point)]
        body += self._legend()
        height = self.height + _LEGEND_ROW * ((len(self._named) + 2) // 3)
        return (
            f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(self.title)}">'
            f"{''.join(body)}</svg>"
        )

    def _px(self, value: float) -> float:
        return round(_LEFT + self.x.share(value) * (WIDTH - _LEFT - _RIGHT), 1)

    def _py(self, value: float) -> float:
        return round(self.height - _BOTTOM - self.y.share(value) * (self.height - _TOP - _BOTTOM), 1)

    def _grid(self) -> list[str]:
        bottom, right = self.height - _BOTTOM, WIDTH - _RIGHT
        parts = []
        for value in self.y.ticks():
            at = self._py(value)
            parts.append(f'<path class="grid" d="M{_LEFT} {at}H{right}"/>')
            parts.append(
                f'<text class="tick" x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">{escape(self.y.text(value))}</text>'
            )
        for value in self.x.ticks():
            at = self._px(value)
            parts.append(f'<path class="grid" d="M{at} {_TOP}V{bottom}"/>')
            text = escape(self.x.text(value))
            parts.append(f'<text class="tick" x="{at}" y="{bottom + 17}" text-anchor="middle">{text}</text>')
        middle = (_TOP + bottom) / 2
        parts.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
        parts.append(
            f'<text class="label" x="{(_LEFT + right) / 2}" y="{bottom + 36}" text-anchor="middle">'
            f"{escape(self.x.label)}</text>"
        )
        parts.append(
            f'<text class="label" transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y.label)}</text>"
        )
        return parts

    def _level(self) -> list[str]:
        if self.level is None:
            return []
        value, text = self.level
        at, right = self._py(value), WIDTH - _RIGHT
        return [
            f'<path class="level" d="M{_LEFT} {at}H{right}"/>',
            f'<text class="level" x="{right}" y="{at - 5}" text-anchor="end">{escape(text)}</text>',
        ]

    def _line(self, series: Series) -> list[str]:
        if len(series.points) < 2:
            return []
        ordered = sorted(series.points, key=lambda point: point.x)
        steps = "L".join(f"{self._px(point.x)} {self._py(point.y)}" for point in ordered)
        dashed = " dashed" if series.is_dashed else ""
        return [f'<path class="line s{series.colour}{dashed}" d="M{steps}"/>']

    def _point(self, series: Series, point: Point) -> list[str]:
        parts = []
        x, y = self._px(point.x), self._py(point.y)
        if point.low is not None and point.high is not None:
            low = self._py(max(self.y.low, point.low))
            high = self._py(min(self.y.high, point.high))
            parts.append(
                f'<path class="interval s{series.colour}" d="M{x} {low}V{high}M{x - 4} {low}h8M{x - 4} {high}h8"/>'
            )
        if series.mark is not None:
            parts.append(_mark(series.mark, series.colour, x, y, point.title))
        return parts

    def _legend(self) -> list[str]:
        """Return the legend under the chart, three names in a row."""
        parts = []
        column = (WIDTH - _LEFT - _RIGHT) / 3
        for number, series in enumerate(self._named):
            x = _LEFT + column * (number % 3)
            y = self.height + _LEGEND_ROW * (number // 3) + 4
            if series.is_line:
                dashed = " dashed" if series.is_dashed else ""
                parts.append(f'<path class="line s{series.colour}{dashed}" d="M{x} {y}h18"/>')
            if series.mark is not None:
                parts.append(_mark(series.mark, series.colour, x + 9, y, ""))
            parts.append(f'<text class="legend" x="{x + 24}" y="{y + 4}">{escape(series.name)}</text>')
        return parts


def _mark(mark: Mark, colour: int, x: float, y: float, title: str) -> str:
    """Return one mark. Its title shows when the pointer rests on it."""
    r = _RADIUS
    forms = {
        "dot": f'<circle class="mark s{colour}" cx="{x}" cy="{y}" r="{r}"',
        "ring": f'<circle class="ring s{colour}" cx="{x}" cy="{y}" r="{r}"',
        "square": f'<rect class="mark s{colour}" x="{x - r}" y="{y - r}" width="{2 * r}" height="{2 * r}"',
        "diamond": f'<path class="mark s{colour}" d="M{x} {y - 7}L{x + 7} {y}L{x} {y + 7}L{x - 7} {y}Z"',
        "cross": f'<path class="ring s{colour}" d="M{x - r} {y - r}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}"',
    }
    shown = f"><title>{escape(title)}</title>" if title else ">"
    element = "circle" if mark in ("dot", "ring") else "rect" if mark == "square" else "path"
    return f"{forms[mark]}{shown}</{element}>"


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
