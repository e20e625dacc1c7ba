"""Pictures as SVG files: those of a model card, which are loss or KL over bytes and bits, and that of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moec.manifests.bundle import BITS_PICTURE_NAME, LOSSES_PICTURE_NAME, BundleManifest

from .curves import Curve
from .figures.losses import kl_chart, loss_chart
from .figures.maps import bits_of
from .svg.cell_map import CellMap
from .svg.chart import Chart, Point, Series, scale_of
from .text import share_text, size_text, svg_file, tick_share

MAX_PICTURE_BYTES = 60_000
"""Size of a picture for a model of 48 layers with 128 experts, bytes."""


@dataclass(frozen=True, slots=True)
class CardPicture:
    """A picture of a model card.

    name: name of its file.
    title: what it shows.
    data: content of the file.
    """

    name: str
    title: str
    data: bytes


def card_pictures(manifest: BundleManifest, quality: Mapping[str, Any]) -> list[CardPicture]:
    """Return the pictures that a bundle has numbers for. Equal bundles give equal bytes.

    KL over bytes has the frontiers of the baselines. Without a search there is none; losses stand in for it.
    quality: content of quality.json. Raises TypeError or KeyError for another form.
    """
    pictures = []
    chart = kl_chart(quality) or loss_chart(quality)
    if chart is not None:
        pictures.append(CardPicture(LOSSES_PICTURE_NAME, chart.title, svg_file(chart.to_svg()).encode()))
    left_out = [set(row) for row in manifest.pruned_experts]
    bits = [
        [None if expert in left_out[layer] else value for expert, value in enumerate(row)]
        for layer, row in enumerate(bits_of(manifest))
    ]
    drawn = CellMap("Bits per weight of every expert", "bits", bits)
    pictures.append(CardPicture(BITS_PICTURE_NAME, drawn.title, svg_file(drawn.to_svg()).encode()))
    return pictures


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
