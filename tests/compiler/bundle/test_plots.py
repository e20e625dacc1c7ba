"""The picture of the report: a PNG for every kind of report, without a warning."""

from __future__ import annotations

import struct
import sys
from typing import Any

import pytest

from moec.compiler.bundle.plots import report_picture
from moec.compiler.request.targets import Target
from moec.compiler.search.baselines import BaselineResult
from moec.compiler.search.comparison import Comparison
from moec.manifests.errors import MissingDependency
from tests.compiler.bundle.test_quality import mixed_plan, report

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def size_of(image: bytes) -> tuple[int, int]:
    """Return width and height from the header of a PNG."""
    assert image.startswith(SIGNATURE) and image.rstrip().endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", image[16:24])
    return width, height


def empty_comparison() -> Comparison:
    plan = mixed_plan()
    return Comparison(plan, 0.0, *(BaselineResult(name, None, ((100, 0.0),)) for name in ("a", "b", "c")))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"statistics": None, "comparison": None, "trials": [], "sensitivity": None, "target": Target("uniform", 4)},
        {"comparison": empty_comparison()},
    ],
    ids=["everything", "uniform", "no divergence anywhere"],
)
def test_a_picture_of_every_report(changes: dict[str, Any]) -> None:
    quality = report(**changes)
    if not changes:
        quality["statistics"] = {"popularity": [[0.1, 0.2, 0.3, 0.4], [0.25] * 4], "popularity_entropy": [0.9, 1.0]}
    width, height = size_of(report_picture("tiny-moec", quality))
    assert width > 800 and height > 500


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency) as caught:
        report_picture("tiny-moec", report())
    assert "moec[compile]" in str(caught.value.hint)
