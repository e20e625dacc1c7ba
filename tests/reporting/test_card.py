"""The pictures of the model card: their values are the bundle's, they need nothing else, and they stay small."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from moec.manifests.bundle import CARD_NAME, MANIFEST_NAME, QUALITY_NAME, BundleManifest
from moec.manifests.codec import decode_manifest
from moec.reporting.card import MAX_PICTURE_BYTES, card_pictures
from moec.reporting.figures.losses import kl_chart
from moec.reporting.svg.cell_map import RAMP, CellMap
from moec.reporting.text import page_file, svg_file

BUNDLE = Path(__file__).parents[2] / "examples" / "bundle"
QUALITY: dict[str, Any] = json.loads((BUNDLE / QUALITY_NAME).read_text())
MANIFEST: BundleManifest = decode_manifest((BUNDLE / MANIFEST_NAME).read_bytes(), MANIFEST_NAME)
LARGE = 48, 128
RUN = re.compile(r"([Mm])(-?\d+) (-?[\d.]+)h(\d+)")


def pictures(quality: dict[str, Any] = QUALITY) -> dict[str, str]:
    """Return the pictures of the shipped bundle by name."""
    return {each.name: each.data.decode() for each in card_pictures(MANIFEST, quality)}


def drawn_cells(picture: str) -> dict[str, set[tuple[int, int]]]:
    """Return the (layer, expert) that each path of a map strokes, by colour."""
    found: dict[str, set[tuple[int, int]]] = {}
    for colour, path in re.findall(r'<path (?:stroke|style)="([^"]+)"(?: stroke-width="0.3")? d="([^"]+)"', picture):
        x = y = 0
        for kind, dx, dy, length in RUN.findall(path):
            x, y = (int(dx), int(float(dy))) if kind == "M" else (x + int(dx), y + int(dy))
            found.setdefault(colour, set()).update((y, x + step) for step in range(int(length)))
            x += int(length)
    return found


def test_a_card_has_the_frontiers_and_the_bits() -> None:
    found = pictures()
    chart = kl_chart(QUALITY)
    assert chart is not None and list(found) == ["losses.svg", "bits.svg"]
    assert chart.to_svg().partition(">")[2] in found["losses.svg"]
    for baseline in QUALITY["comparison"]["baselines"]:
        assert f">{baseline['name']}</text>" in found["losses.svg"]


def test_the_shipped_bundle_shows_its_pictures() -> None:
    card = (BUNDLE / CARD_NAME).read_text()
    for picture in card_pictures(MANIFEST, QUALITY):
        assert f"![{picture.title}]({picture.name})" in card, "run `make example-bundle`"
        assert (BUNDLE / picture.name).read_bytes() == picture.data


def test_a_bundle_without_a_search_has_a_map_alone() -> None:
    assert list(pictures({**QUALITY, "trials": [], "comparison": None, "tasks": {}})) == ["bits.svg"]


def test_every_expert_has_the_colour_of_its_bits_and_those_left_out_another() -> None:
    values = [[2.0, 4.5, None], [], [4.5, 4.5, 2.0]]
    drawn = CellMap("a map", "bits", values)
    low, high, out = drawn_cells(drawn.to_svg()).values()
    assert (low, high, out) == ({(0, 0), (2, 2)}, {(0, 1), (2, 0), (2, 1)}, {(0, 2)})
    assert all(text in drawn.to_svg() for text in (">2 bits<", ">4.5<", ">left out<"))
    own = drawn_cells(pictures()["bits.svg"])
    units = [units for row in QUALITY["bits"]["units"]["down"] for units in row]
    assert sum(map(len, own.values())) == len(units) and len(own) > 1


def test_many_values_are_classes_of_rising_lightness() -> None:
    levels = CellMap("a map", "bits", np.linspace(1, 16, 200).reshape(4, 50).tolist()).levels()
    assert [level.colour for level in levels] == ["#{:02x}{:02x}{:02x}".format(*colour) for colour in RAMP]
    assert all(before.cells[-1] < after.cells[0] for before, after in pairwise(levels))
    assert f"const ramp = {[list(colour) for colour in RAMP]!s}" in re.sub(r"\s+", " ", page_file("report.js"))


@pytest.mark.parametrize("name", ["losses.svg", "bits.svg"])
def test_a_picture_is_a_file_of_its_own_without_script_or_request(name: str) -> None:
    picture = pictures()[name]
    root = ElementTree.fromstring(picture)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= {"svg", "style", "rect", "path", "circle", "text", "title"}
    for outside in ("href", "url(", "@import", "http:", "https:"):
        assert outside not in picture.replace("http://www.w3.org/2000/svg", "")
    assert "prefers-color-scheme: dark" in picture and "fill:var(--paper)" in picture
    assert len(picture.encode()) <= MAX_PICTURE_BYTES
    assert pictures() == pictures()


def test_a_map_of_48_layers_with_128_experts_stays_small() -> None:
    worst = np.random.default_rng(0).uniform(1, 16, LARGE).tolist()
    assert len(svg_file(CellMap("a map", "bits", worst).to_svg()).encode()) <= MAX_PICTURE_BYTES


def test_a_hostile_name_stays_text() -> None:
    hostile = json.loads(json.dumps(QUALITY))
    hostile["comparison"]["baselines"][0]["name"] = '<script>alert("x")</script>'
    found = card_pictures(replace(MANIFEST), hostile)[0].data.decode()
    assert "<script" not in found and ElementTree.fromstring(found) is not None
