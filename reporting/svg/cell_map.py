"""A map of layers x experts as SVG: one cell per expert, its colour the class of its value.

Cells of one class are one path, so a map of 48 x 128 experts takes less than 50 kB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from .chart import WIDTH

RAMP = (
    (0, 34, 78), (18, 53, 112), (59, 73, 108), (87, 93, 109), (112, 113, 115), (138, 134, 120), (165, 156, 116),
    (195, 179, 105), (225, 204, 85), (254, 232, 56),
)  # fmt: skip
"""Cividis: even in lightness, and safe for the colour-blind. `page/report.js` has the same colours."""
_LEFT, _RIGHT, _TOP, _AXIS = 58, 26, 12, 46
_LARGEST_CELL, _MAP_HEIGHT, _LEAST_CELL = 26.0, 560.0, 6.0
_MOST_TICKS = 16
_LEAST_SEPARATED = 5.0
"""Width of a cell from which lines separate cells."""
_LEGEND_ROW, _LEGEND_COLUMNS = 18, 5
_SAME = 1e-9
Cells = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Level:
    """One class of values.

    text: its values in the legend.
    colour: as `#rrggbb`.
    cells: (layer, expert) of its experts, in rising order.
    """

    text: str
    colour: str
    cells: Cells


@dataclass(frozen=True, slots=True)
class CellMap:
    """A map.

    title: what it shows, for people who do not see it.
    unit: unit of the values.
    rows: one value per expert, [L][E]; None: the expert is left out. A layer without experts has an empty row.
    """

    title: str
    unit: str
    rows: Sequence[Sequence[float | None]]

    def levels(self) -> list[Level]:
        """Return the classes that occur, least values first. Few different values are a class each."""
        cells = [(value, at) for value, at in self._cells() if value is not None]
        values = sorted({value for value, _ in cells})
        if not values:
            return []
        low, span = values[0], max(values[-1] - values[0], _SAME)
        is_exact = len(values) <= len(RAMP)
        groups: dict[int, list[tuple[float, tuple[int, int]]]] = {}
        for value, at in cells:
            share = (value - low) / span
            group = values.index(value) if is_exact else min(int(share * len(RAMP)), len(RAMP) - 1)
            groups.setdefault(group, []).append((value, at))
        share_index = []
        for group in sorted(groups):
            least, most = min(groups[group])[0], max(groups[group])[0]
            text = f"{least:.3g}" if least == most else f"{least:.3g} to {most:.3g}"
            colour = RAMP[round((least - low) / span * (len(RAMP) - 1)) if is_exact else group]
            share_index.append(Level(text, "#{:02x}{:02x}{:02x}".format(*colour), [at for _, at in groups[group]]))
        return share_index

    def to_svg(self) -> str:
        layers, experts = len(self.rows), max(map(len, self.rows))
        cell = min(_LARGEST_CELL, max(_LEAST_CELL, _MAP_HEIGHT / layers))
        height, width = round(cell * layers, 1), WIDTH - _LEFT - _RIGHT
        levels, left_out = self.levels(), [at for value, at in self._cells() if value is None]
        drawn = [f'<path stroke="{level.colour}" d="{_runs(level.cells)}"/>' for level in levels]
        if left_out:
            drawn.append(f'<path style="stroke:var(--c1)" stroke-width="0.3" d="{_runs(left_out)}"/>')
        legend = [(level.text, f"fill:{level.colour}", 10.0) for level in levels]
        legend += [("left out", "fill:var(--c1)", 3.0)] if left_out else []
        separators = ""
        if width / experts > _LEAST_SEPARATED:
            steps = [f"M{at} 0v{layers}" for at in range(1, experts)] + [
                f"M0 {at}h{experts}" for at in range(1, layers)
            ]
            path = "".join(steps)
            separators = f'<path style="stroke:var(--paper)" vector-effect="non-scaling-stroke" d="{path}"/>'
        bottom = _TOP + height
        whole = round(bottom + _AXIS + _LEGEND_ROW * (1 + (len(legend) - 1) // _LEGEND_COLUMNS) + 8)
        parts = [
            f'<svg class="chart" viewBox="0 0 {WIDTH} {whole}" role="img" aria-label="{escape(self.title)}">',
            f'<svg x="{_LEFT}" y="{_TOP}" width="{width}" height="{height}" viewBox="0 0 {experts} {layers}" '
            'preserveAspectRatio="none" stroke-width="1" shape-rendering="crispEdges">',
            *drawn,
            separators,
            "</svg>",
            *(
                _text("tick", _LEFT + (at + 0.5) / experts * width, bottom + 17, "middle", str(at))
                for at in _ticks(experts)
            ),
            *(_text("tick", _LEFT - 8, _TOP + (at + 0.5) * cell + 4, "end", str(at)) for at in _ticks(layers)),
            _text("label", _LEFT + width / 2, bottom + 36, "middle", "expert"),
            f'<text class="label" transform="translate(14 {round(_TOP + height / 2, 1)}) rotate(-90)" '
            'text-anchor="middle">layer</text>',
            *self._legend(legend, bottom + _AXIS),
            "</svg>",
        ]
        return "".join(parts)

    def _cells(self) -> Iterator[tuple[float | None, tuple[int, int]]]:
        for layer, row in enumerate(self.rows):
            for expert, value in enumerate(row):
                yield value, (layer, expert)

    def _legend(self, entries: Sequence[tuple[str, str, float]], top: float) -> list[str]:
        """Return swatches and texts. entries: text, style and height of each swatch."""
        parts, column = [], (WIDTH - _LEFT - _RIGHT) / _LEGEND_COLUMNS
        for number, (text, style, size) in enumerate(entries):
            x = _LEFT + column * (number % _LEGEND_COLUMNS)
            y = top + _LEGEND_ROW * (number // _LEGEND_COLUMNS) + 8
            shown = f"{text} {self.unit}" if number == 0 else text
            parts.append(
                f'<rect x="{x:.1f}" y="{y - size / 2:.1f}" width="14" height="{size:g}" style="{style}"/>'
                f"{_text('legend', x + 20, y + 4, 'start', shown)}"
            )
        return parts


def _text(kind: str, x: float, y: float, anchor: str, text: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _ticks(count: int) -> range:
    return range(0, count, -(-count // _MOST_TICKS))


def _runs(cells: Cells) -> str:
    """Return the path of some cells: a horizontal stroke through each run of them. cells: in rising order."""
    runs: list[list[int]] = []
    for layer, expert in cells:
        if runs and runs[-1][0] == layer and runs[-1][1] + runs[-1][2] == expert:
            runs[-1][2] += 1
        else:
            runs.append([layer, expert, 1])
    first, parts = True, []
    x = y = 0
    for layer, expert, length in runs:
        parts.append(f"M{expert} {layer}.5h{length}" if first else f"m{expert - x} {layer - y}h{length}")
        first, x, y = False, expert + length, layer
    return "".join(parts)
