"""Draw the result of a figure as SVG. Equal results and the same matplotlib give equal bytes."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from ..figures import SETTINGS
from ..small_svg import small_svg
from .figure import Measured, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito: people with any colour vision can tell them apart. Markers and line styles differ too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTH, HEIGHT = 5.6, 4.0
"""Inches of one panel."""
MOST_COLUMNS = 3
MOST_TICKS = 16
BARS_WIDTH = 0.8
ROOM_FOR_LABELS = 0.18
"""Space over the bars, as a share of the axis."""
MOST_POINTS_WITH_MARKERS = 20


def draw(title: str, measured: Measured) -> bytes:
    """Return a figure as SVG."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(SETTINGS | {"font.size": 9}):
        columns = min(len(measured.panels), MOST_COLUMNS)
        rows = -(-len(measured.panels) // columns)
        figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows), facecolor="white", layout="constrained")
        FigureCanvasSVG(figure)
        for number, panel in enumerate(measured.panels):
            axis = figure.add_subplot(rows, columns, number + 1)
            _DRAWN[panel.kind](axis, panel)
            axis.set_title(panel.title, fontsize=10)
            axis.set_xlabel(panel.x_label)
            axis.set_ylabel(panel.y_label)
        image = BytesIO()
        figure.savefig(image, format="svg", metadata={"Title": title})
    return small_svg(image.getvalue())


def _lines(axis: Axes, panel: Panel) -> None:
    for number, (name, points) in enumerate(panel.points.items()):
        has_markers = len(points) <= MOST_POINTS_WITH_MARKERS
        axis.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name,
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)] if has_markers else None,
            markersize=4,
            linestyle=("-", "--", "-.", ":")[number // 2 % 4],
            linewidth=1.4,
        )
    _scale(axis, panel)
    axis.grid(alpha=0.3)
    _legend(axis, len(panel.points))


def _bars(axis: Axes, panel: Panel) -> None:
    places = np.arange(len(panel.groups))
    width = BARS_WIDTH / max(len(panel.bars), 1)
    for number, (name, heights) in enumerate(panel.bars.items()):
        at = places + (number - (len(panel.bars) - 1) / 2) * width
        drawn = axis.bar(at, heights, width, label=name, color=COLOURS[number % len(COLOURS)])
        axis.bar_label(drawn, [f"{height:.3g}" for height in heights], fontsize=6, padding=1, rotation=90)
    is_crowded = sum(map(len, panel.groups)) > 40
    axis.set_xticks(places, panel.groups, rotation=25 if is_crowded else 0, ha="right" if is_crowded else "center")
    axis.margins(y=ROOM_FOR_LABELS)
    _scale(axis, panel)
    axis.grid(alpha=0.3, axis="y")
    axis.set_axisbelow(True)
    _legend(axis, len(panel.bars))


def _map(axis: Axes, panel: Panel) -> None:
    """Draw one cell per expert, darker for larger values, with the value in it if the map is small."""
    values = np.array(panel.rows, float)
    shown = axis.pcolormesh(values, cmap="cividis_r", edgecolors="white", linewidth=0.5)
    for count, set_ticks in ((values.shape[1], axis.set_xticks), (values.shape[0], axis.set_yticks)):
        shown_at = range(0, count, -(-count // MOST_TICKS))
        set_ticks([at + 0.5 for at in shown_at], [str(at) for at in shown_at])
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    if values.shape[1] <= 8:
        for row, column in np.ndindex(*values.shape):
            value = values[row, column]
            colour = "white" if value > middle else "black"
            text = f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.1g}"
            axis.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=7, color=colour)
    figure = axis.get_figure()
    if figure is not None:
        figure.colorbar(shown, ax=axis)


def _legend(axis: Axes, count: int) -> None:
    """Put the names under the axes, where they cover nothing."""
    if count > 1:
        axis.legend(frameon=False, fontsize=8, ncol=3, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _scale(axis: Axes, panel: Panel) -> None:
    if panel.is_log:
        axis.set_yscale("log")
    elif all(value >= 0 for value in _values(panel)):
        axis.set_ylim(bottom=0)


def _values(panel: Panel) -> list[float]:
    heights = [height for line in panel.bars.values() for height in line]
    return heights + [y for line in panel.points.values() for _, y in line]


_DRAWN = {"lines": _lines, "bars": _bars, "map": _map}
