"""The report on a phone. These tests need `make page-driver` and Debian's chromium."""

from __future__ import annotations

from pathlib import Path

import pytest

from moec.reporting.report import report_page
from tests.page_driver import page_driver
from tests.reporting.test_page import FULL


@pytest.mark.parametrize("width", [1000, 390, 320])
def test_the_report_fits_and_its_charts_can_be_read(tmp_path: Path, width: int) -> None:
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
