"""The pictures of docs/pictures show the numbers of bench/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import figures
from bench.recorded import recorded

ROOT = Path(__file__).parents[2]
NAMES = ("example-bytes-over-loss", "yardstick-decode-over-share")
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
GROUP = "{http://www.w3.org/2000/svg}g"
MARKER = "{http://www.w3.org/2000/svg}use"
DRAWN_ERROR = 1e-3  # points of the page; matplotlib writes six digits after the point


def numbers(name: str) -> Any:
    """Return the numbers that a picture holds."""
    tree = ElementTree.parse(ROOT / "docs" / "pictures" / f"{name}.svg")
    description = tree.find(f".//{DESCRIPTION}")
    assert description is not None and description.text
    return json.loads(description.text)


def drawn(name: str) -> list[list[tuple[float, float]]]:
    """Return the places of the markers on the page, by line."""
    groups = ElementTree.parse(ROOT / "docs" / "pictures" / f"{name}.svg").iter(GROUP)
    lines = [group for group in groups if group.get("id", "").startswith("series-")]
    return [[(float(use.get("x", "nan")), float(use.get("y", "nan"))) for use in line.iter(MARKER)] for line in lines]


def test_every_picture_is_drawn_by_the_script() -> None:
    files = sorted(path.stem for path in (ROOT / "docs" / "pictures").glob("*.svg"))
    assert files == sorted(NAMES) == sorted(picture.name for picture in figures.pictures())


def test_bytes_over_loss_are_those_of_the_sweep() -> None:
    found = numbers("example-bytes-over-loss")
    curve = recorded(found["source"], "example.curve.json")[0]["curve"]
    assert [point["target"] for point in curve] == [0.01, 0.02, 0.05, 0.1]
    wanted = {
        "moec": [point["expert_packed_bytes"] for point in curve],
        "best uniform format": [point["baselines"]["best uniform"] for point in curve],
        "EdgeMoE's search, moec's quantizer": [point["baselines"]["EdgeMoE with our quantizer"] for point in curve],
        "one format per layer": [point["baselines"]["one format per layer"] for point in curve],
    }
    assert set(found["series"]) == set(wanted)
    for label, sizes in wanted.items():
        assert [point["x"] for point in found["series"][label]] == pytest.approx([1, 2, 5, 10])
        assert [round(1e6 * point["y"]) for point in found["series"][label]] == sizes


@pytest.mark.parametrize(
    ("label", "limited", "unlimited"),
    [
        ("moec", "moec", "moec"),
        ("llama.cpp", "llama.cpp mmap 128 KiB", "llama.cpp repacked"),
        ("ik_llama.cpp", "ik_llama.cpp mmap 128 KiB", "ik_llama.cpp repacked"),
    ],
)
def test_speeds_are_those_of_the_comparison(label: str, limited: str, unlimited: str) -> None:
    found = numbers("yardstick-decode-over-share")
    rows = recorded(found["source"], "summary.json")
    wanted = []
    for share, condition in ((25, "cache-25"), (50, "cache-50"), (75, "cache-75"), (100, "memory32")):
        arm = unlimited if share == 100 else limited
        (row,) = [row for row in rows if row["condition"] == condition and row["arm"] == arm]
        speeds = {"y": row["decode_tokens_per_s"], "least": row["decode_least"], "most": row["decode_most"]}
        wanted.append({"x": share, **speeds})
    assert found["series"][label] == wanted


@pytest.mark.parametrize("name", NAMES)
def test_lines_are_drawn_where_their_numbers_are(name: str) -> None:
    """Axes are linear: one scale and one shift per axis put every number where its marker is."""
    series = [[(point["x"], point["y"]) for point in line] for line in numbers(name)["series"].values()]
    places = drawn(name)
    assert [len(line) for line in places] == [len(line) for line in series]
    pairs = [pair for line, marks in zip(series, places, strict=True) for pair in zip(line, marks, strict=True)]
    for axis in (0, 1):
        by_value = sorted((value[axis], mark[axis]) for value, mark in pairs)
        (low, first), (high, last) = by_value[0], by_value[-1]
        scale = (last - first) / (high - low)
        assert scale > 0 if axis == 0 else scale < 0  # rows of an SVG count from the top
        for value, mark in by_value:
            assert mark == pytest.approx(first + scale * (value - low), abs=DRAWN_ERROR)


def test_a_picture_drawn_twice_has_the_same_bytes() -> None:
    first, second = (figures.draw(figures.bytes_over_loss()) for _ in range(2))
    assert first == second
    assert b"<dc:date>" not in first and str(ROOT).encode() not in first


@pytest.mark.parametrize("picture", figures.pictures(), ids=lambda picture: picture.name)
def test_pictures_are_those_of_the_script(picture: figures.Picture) -> None:
    assert numbers(picture.name) == json.loads(json.dumps(picture.numbers())), "run `make figures`"
