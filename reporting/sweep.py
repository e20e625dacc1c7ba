"""The picture of a sweep: bytes of the experts over the permitted loss, as an SVG file of its own."""

from __future__ import annotations

from .curves import Curve
from .page_files import svg_file
from .svg.chart import Chart, Point, Series
from .svg.scale import scale_of
from .text import share_text, size_text, tick_share


def sweep_svg(name: str, curves: list[Curve]) -> str:
    """Return the curves as an SVG file. It has its own style sheet.

    name: name of the bundle.
    """
    series = []
    for number, curve in enumerate(curves):
        points = [
            Point(
                point.loss, point.expert_bytes, f"{curve.name}: {share_text(point.loss)}, {point.expert_bytes:,} bytes"
            )
            for point in curve.points
            if point.loss is not None and point.loss > 0
        ]
        series.append(Series(curve.name, points, number % 7, "dot", is_line=True, is_dashed=number > 0))
    points = [point for row in series for point in row.points]
    x = scale_of([point.x for point in points], "relative loss allowed", tick_share, is_log=True)
    y = scale_of([point.y for point in points] or [1.0], "bytes of the routed experts", size_text, from_zero=True)
    chart = Chart(f"{name}: bytes of the routed experts at each loss", x, y, series)
    return svg_file(chart.to_svg())
