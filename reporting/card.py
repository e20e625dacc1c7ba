"""The pictures of a model card: loss or KL over bytes, and the bits of every expert. Each is an SVG file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moec.manifests.bundle import BITS_PICTURE_NAME, LOSSES_PICTURE_NAME, BundleManifest

from .figures.losses import kl_chart, loss_chart
from .figures.maps import bits_of
from .page_files import svg_file
from .svg.cell_map import CellMap

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
