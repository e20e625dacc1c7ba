"""Scales, ticks, charts and curves: values lie inside, the SVG is well formed, and bad curves are one sentence."""

from __future__ import annotations

import json
import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.errors import InputError
from moec.reporting.curves import Curve, CurvePoint, read_curves
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


SWEEP = {
    "curve": [
        {"target": 0.01, "expert_packed_bytes": 300, "kl": 0.002, "baselines": {"best uniform": 400}},
        {"target": 0.05, "expert_packed_bytes": None, "kl": None, "baselines": {"best uniform": None}},
    ]
}


def test_a_sweep_has_its_own_curve_and_those_of_its_baselines() -> None:
    own = Curve("moec", [CurvePoint(300, 0.01, 0.002)])
    assert read_curves(json.dumps(SWEEP).encode(), "f") == [own, Curve("best uniform", [CurvePoint(400, 0.01, None)])]


def test_curves_of_other_engines() -> None:
    plain = [{"name": "Q4_K_M", "points": [{"bytes": 500, "kl": 0.07, "loss": None}]}]
    assert read_curves(json.dumps(plain).encode(), "f") == [Curve("Q4_K_M", [CurvePoint(500, None, 0.07)])]


@pytest.mark.parametrize(
    "plain",
    [
        {},
        [1],
        [{"name": 5, "points": []}],
        [{"name": "x", "points": [{"bytes": -1}]}],
        [{"name": "x", "points": [{"bytes": 5, "kl": "much"}]}],
        {"curve": [{"target": "1 %"}]},
        {"curve": 5},
        [{"name": "\ud800", "points": []}],
        {"curve": [{"target": 0.01, "expert_packed_bytes": 3, "baselines": {"\udfff": 400}}]},
        [{"name": "x", "points": [{"bytes": 5, "loss": 1e308}]}],
        [{"name": "x", "points": [{"bytes": 5, "kl": -1e7}]}],
        [{"name": "x", "points": [{"bytes": 5, "loss": 10**400}]}],
        [{"name": "x", "points": []}] * 33,
    ],
)
def test_other_content_is_refused_in_one_sentence(plain: object) -> None:
    with pytest.raises(InputError) as refused:
        read_curves(json.dumps(plain).encode(), "other.json")
    assert refused.value.message.startswith("`other.json`: expected") and refused.value.hint


@given(st.binary(max_size=200))
def test_any_bytes_are_curves_or_refused(data: bytes) -> None:
    try:
        assert isinstance(read_curves(data, "f"), list)
    except InputError as refused:
        assert "`f`" in refused.message
