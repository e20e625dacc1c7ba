"""Scales, ticks and charts: every value lies inside, ticks are round, and the SVG is well formed."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.reporting.svg.chart import WIDTH, Chart, Point, Scale, Series, scale_of
from moec.reporting.text import number, size_text, size_unit

VALUES = st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=20)


def plain(value: float) -> str:
    return f"{value:g}"


@given(VALUES, st.booleans(), st.sampled_from([1.0, 1024.0, 2.0**20]))
def test_a_scale_holds_its_values_and_has_round_ticks(values: list[float], is_log: bool, unit: float) -> None:
    scale = scale_of(values, "x", plain, is_log=is_log, unit=unit)
    assert all(0 <= scale.share(value) <= 1 for value in values)
    ticks = scale.ticks()
    assert len(ticks) <= 40 and ticks == sorted(ticks)
    for tick in ticks:
        assert scale.low * (1 - 1e-9) <= tick <= scale.high * (1 + 1e-9) or abs(tick) < 1e-9
        if tick:
            digits = tick / unit / 10 ** math.floor(math.log10(abs(tick) / unit))
            assert digits == pytest.approx(round(digits, 3), rel=1e-6)


def test_a_linear_scale_from_zero_begins_there() -> None:
    scale = scale_of([3.0, 8.0], "y", plain, from_zero=True)
    assert scale.low == 0 and scale.share(0) == 0
    assert scale.ticks()[:3] == [0, 2, 4]


def test_sizes_have_ticks_in_their_unit() -> None:
    scale = scale_of([2e6, 18e6], "bytes", size_text, is_log=True, unit=size_unit(18e6))
    assert [size_text(tick) for tick in scale.ticks()] == ["2 MiB", "5 MiB", "10 MiB"]


def test_a_chart_is_well_formed_and_names_its_points() -> None:
    points = [Point(1.0, 0.1, "first & <best>", 0.05, 0.2), Point(10.0, 0.4, "second")]
    series = [
        Series(mark, points, at, mark, is_line=at % 2 == 0)
        for at, mark in enumerate(("dot", "ring", "diamond", "square", "cross"))
    ]
    x, y = Scale(0.5, 20, "x", plain, is_log=True), Scale(0, 0.5, "y", plain)
    svg = Chart("a <chart>", x, y, series, (0.3, "target 30 %")).to_svg()
    root = ElementTree.fromstring(svg)
    titles = [element.text for element in root.iter("title")]
    assert titles == ["first & <best>", "second"] * 5
    marks = [float(element.attrib["cx"]) for element in root.iter("circle") if len(element)]
    assert all(0 < at < WIDTH for at in marks)
    assert len(root.findall("path[@class='interval s0']")) == 1
    assert any(element.text == "target 30 %" for element in root.iter("text"))


@pytest.mark.parametrize("value", [None, "1", True, float("nan"), float("inf"), [1]])
def test_only_finite_numbers_are_numbers(value: object) -> None:
    with pytest.raises(TypeError, match="expected a finite number"):
        number(value)
