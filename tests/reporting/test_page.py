"""The page of a bundle: its numbers are those of quality.json, nothing leaves it, and bad input is one sentence."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.bundle import MANIFEST_NAME, QUALITY_NAME, BundleManifest
from moec.manifests.codec import decode_manifest
from moec.manifests.errors import ManifestInvalid
from moec.reporting.curves import Curve, CurvePoint
from moec.reporting.figures.losses import kl_chart, loss_chart, promise_section
from moec.reporting.figures.maps import ExpertMap, Maps, rounded
from moec.reporting.figures.replay import CacheRow, Span, TokenTimeline, side_by_side
from moec.reporting.report import MAX_PAGE_BYTES, Replayed, Report, report_page
from tests.page_driver import page_driver

BUNDLE = Path(__file__).parents[2] / "examples" / "bundle"
QUALITY: dict[str, Any] = json.loads((BUNDLE / QUALITY_NAME).read_text())
MANIFEST: BundleManifest = decode_manifest((BUNDLE / MANIFEST_NAME).read_bytes(), MANIFEST_NAME)
ROWS = [CacheRow(share, policy, share, 1000 * (1 - share)) for policy in ("lrfu", "optimum") for share in (0.1, 0.5)]
SPANS = [Span("dense", 0, 40, 0), Span("read", 10, 90, 0), Span("ahead", 10, 60, 1), Span("wait", 40, 90, 0)]
TOKEN = TokenTimeline(100, 50, 0.5, SPANS)
FULL = Report(MANIFEST, QUALITY, Replayed("a board", ROWS, TOKEN))


def map_data(page: str) -> dict[str, Any]:
    """Return the data that the script of a page draws."""
    found = re.search(r'<script type="application/json" id="map-data">(.*?)</script>', page, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def cells(page: str) -> list[str]:
    """Return the content of all cells of tables."""
    return re.findall(r"<td>(.*?)</td>", page)


def test_the_page_tells_the_kl_of_each_part() -> None:
    parts = [{"part": "routed experts", "kl": 0.004, "bytes": 5_000}, {"part": "attention", "kl": 0.001, "bytes": 70}]
    quality = QUALITY | {"kl_by_part": {"predicted": parts, "validation_kl": 0.0045}}
    shown = cells(report_page(replace(FULL, quality=quality)))
    at = shown.index("routed experts")
    assert shown[at : at + 8] == ["routed experts", "5,000", "80.0 %", "", "attention", "70", "20.0 %", ""]
    assert shown[at + 8 : at + 12] == ["all, validation texts, activations in 32 bits", "", "", "0.0045"]
    assert shown[at + 12] == "all, held-out texts of gsm8k, activations in 8 bits"
    with pytest.raises(ManifestInvalid, match=r"quality\.json"):
        report_page(replace(FULL, quality=quality | {"kl_by_part": {"predicted": 1}}))


def test_maps_have_the_values_of_the_bundle() -> None:
    data = map_data(report_page(FULL))
    own = [[rounded(value) for value in row] for row in QUALITY["statistics"]["popularity"]]
    assert data["maps"]["popularity"]["values"] == own
    units, model = QUALITY["bits"]["units"], MANIFEST.model
    for layer, spec in enumerate(model.layers):
        sizes = [
            model.unit_shape(layer, name)[0] * model.unit_shape(layer, name)[1] for name in spec.experts.projections
        ]
        for expert in range(spec.experts.count):
            stored = [units[name][layer][expert] for name in spec.experts.projections]
            mean = sum(bits * size for bits, size in zip(stored, sizes, strict=True)) / sum(sizes)
            assert data["maps"]["bits"]["values"][layer][expert] == pytest.approx(mean, rel=1e-3)
    assert data["leftOut"] == MANIFEST.pruned_experts


def test_the_map_of_sensitivity_has_the_predicted_losses() -> None:
    losses = [[(layer + 1) * 1.5e-5 + expert for expert in range(8)] for layer in range(6)]
    quality = {**QUALITY, "sensitivity": {"experts": {"format": "q2g64b", "losses": losses}}}
    drawn = map_data(report_page(Report(MANIFEST, quality)))["maps"]["sensitivity"]
    assert drawn["values"] == [[rounded(value) for value in row] for row in losses]
    assert "q2g64b" in drawn["title"]


def test_measured_importance_is_drawn_as_measured() -> None:
    losses = [[(layer + 1) * 1.5e-5 - expert for expert in range(8)] for layer in range(6)]
    quality = {**QUALITY, "comparison": {**QUALITY["comparison"], "expert_losses": {"EdgeMoE's search": losses}}}
    drawn = map_data(report_page(Report(MANIFEST, quality)))["maps"]["measured-0"]
    assert drawn["values"] == [[rounded(value) for value in row] for row in losses]
    assert "measured" in drawn["title"] and "EdgeMoE's search" in drawn["title"]


def test_the_verdict_names_its_task() -> None:
    said = "Supported for gsm8k; other tasks were not measured."
    assert QUALITY["verdict"] == "supported" and said in report_page(FULL)


def test_every_tested_plan_has_a_row() -> None:
    """Plans are tested in turn. A bound that is not finite is no number."""
    rows = [
        {"expert_packed_bytes": 1_234_567, "bits_per_weight": 1.61, "share_of_error": 0.7, "verdict": "not supported"}
        | {"losses": {"gsm8k": 0.0171}, "bounds": {"gsm8k": 0.0222}},
        {"expert_packed_bytes": 2_345_678, "bits_per_weight": 1.83, "share_of_error": 0.2, "verdict": "supported"}
        | {"losses": {"gsm8k": 0.0042}, "bounds": {"gsm8k": None}},
    ]
    page = promise_section(MANIFEST, {**QUALITY, "tested": rows})
    for text in (
        "1,234,567",
        "1.610",
        "1.71 %",
        "2.22 %",
        "3.50 %",
        "not supported",
        "2,345,678",
        "no bound",
        "1.00 %",
    ):
        assert text in page, text
    assert "tested in turn" not in promise_section(MANIFEST, {**QUALITY, "tested": []})


def test_tables_have_the_numbers_of_the_certificate() -> None:
    page = report_page(FULL)
    task = QUALITY["tasks"]["gsm8k"]
    found = cells(page)
    for text in (
        f"{task['n']:,}",
        f"{100 * task['loss']['loss']:.2f} %",
        f"{100 * task['loss']['interval95'][0]:.2f} % to {100 * task['loss']['interval95'][1]:.2f} %",
        f"{QUALITY['sizes']['expert_packed_bytes']:,}",
        f"{QUALITY['comparison']['baselines'][0]['expert_packed_bytes']:,}",
    ):
        assert text in found
    assert "The promise is supported" in page


def test_every_trial_is_in_the_table_and_drawn() -> None:
    page, trials = report_page(FULL), QUALITY["trials"]
    assert f"<summary>{len(trials)} measurements</summary>" in page
    numbers = [cell for cell in cells(page) if cell.isdigit()]
    assert numbers[-1] == str(len(trials))
    losses, divergences = loss_chart(QUALITY), kl_chart(QUALITY)
    assert losses is not None and divergences is not None
    drawn = {point.y for series in losses.series for point in series.points}
    most = 3 * QUALITY["target"]["value"]
    measured = {loss["loss"] for trial in trials for loss in trial["losses"].values() if loss["loss"] <= most}
    assert drawn == measured | {QUALITY["tasks"]["gsm8k"]["loss"]["loss"]}
    searched = {t["kl"]["mean"] for t in trials if t["kl"] and t["purpose"] in ("search", "swaps", "plan")}
    assert searched <= {point.y for series in divergences.series for point in series.points}


def test_a_page_asks_nothing_of_a_network() -> None:
    page = report_page(FULL)
    assert not re.findall(r"""(?:src|href|action)\s*=|url\(|@import|https?://|fetch\(|XMLHttpRequest""", page)
    assert "default-src 'none'" in page
    assert report_page(FULL) == page


@pytest.mark.parametrize("report", [Report(MANIFEST, None), Report(MANIFEST, QUALITY), FULL])
def test_a_page_is_written_with_whatever_there_is(report: Report) -> None:
    page = report_page(report)
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")
    assert ("No trace was given" in page) == (report.replayed is None)
    assert ("The quality was not measured" in page) == (report.quality is None)


def test_texts_of_a_bundle_are_shown_and_not_run() -> None:
    hostile = "</script><script>alert(1)</script><img onerror=x>"
    quality = copy.deepcopy(QUALITY)
    quality["trials"][0]["purpose"] = quality["comparison"]["baselines"][0]["name"] = hostile
    quality["tasks"] = {hostile: quality["tasks"]["gsm8k"]}
    quality["sensitivity"] = {"experts": {"format": hostile, "losses": QUALITY["statistics"]["popularity"]}}
    curve = Curve(hostile, [CurvePoint(10**6, 0.01, 0.001)])
    page = report_page(Report(replace(MANIFEST, name=hostile), quality, FULL.replayed, [curve]))
    assert "<script>alert" not in page and "<img" not in page
    assert page.count("<script") == 2


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values that are no containers."""
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in leaves(item, (*path, key))]
    if isinstance(value, list):
        return [found for at, item in enumerate(value[:3]) for found in leaves(item, (*path, at))]
    return [path]


PATHS = leaves(QUALITY)
WRONG = [None, "text", -1, 10**400, True, [], {}, [None], float("1e308"), "<b>"]


@given(st.sampled_from(PATHS), st.sampled_from(WRONG), st.integers(1, 6))
def test_a_wrong_value_gives_a_page_or_one_sentence(path: tuple[Any, ...], wrong: Any, depth: int) -> None:
    quality: Any = copy.deepcopy(QUALITY)
    place: Any = quality
    steps = path[: max(1, len(path) - depth + 1)]
    for step in steps[:-1]:
        place = place[step]
    place[steps[-1]] = wrong
    try:
        page = report_page(Report(MANIFEST, quality))
    except ManifestInvalid as refused:
        assert "does not have the form of a certificate" in refused.message
    else:
        assert "</html>" in page and "<b>" not in page.replace("<body>", "")


def test_a_large_model_fits_the_promised_size() -> None:
    values = [[rounded(1 / (1 + layer + 0.37 * expert)) for expert in range(128)] for layer in range(48)]
    each = ExpertMap("a value", "units", True, values)
    plain = Maps({"bits": each, "popularity": each, "sensitivity": each}, [[]] * 48).to_plain()
    data = json.dumps(plain, separators=(",", ":"))
    rest = len(report_page(FULL)) - len(json.dumps(map_data(report_page(FULL)), separators=(",", ":")))
    assert len(data) + 3 * rest < MAX_PAGE_BYTES


def test_reads_at_the_same_time_stand_side_by_side() -> None:
    rows = side_by_side([span for span in SPANS if span.kind in ("read", "ahead")])
    assert [len(row) for row in rows] == [1, 1]
    assert side_by_side([Span("read", 0, 5, 0), Span("read", 5, 9, 0)]) == [
        [Span("read", 0, 5, 0), Span("read", 5, 9, 0)]
    ]


@pytest.mark.parametrize("width", [1000, 390, 320])
def test_the_report_fits_and_its_charts_can_be_read(tmp_path: Path, width: int) -> None:
    """On a screen and on phones, in Debian's chromium of `make page-driver`."""
    playwright, chromium = page_driver()
    (tmp_path / "report.html").write_text(report_page(FULL))
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.goto((tmp_path / "report.html").as_uri())
        found = page.evaluate("() => document.documentElement.scrollWidth")
        heights = page.evaluate(
            "() => [...document.querySelectorAll('.chart text')].map(each => each.getBoundingClientRect().height)"
        )
        browser.close()
    assert found <= width and len(heights) > 20 and min(heights) >= 10
