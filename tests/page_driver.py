"""Playwright and Debian's chromium, which tests of pages drive."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

_PACKAGES = Path(__file__).parents[1] / "build" / "page-driver"


def page_driver() -> tuple[Any, str]:
    """Return playwright and the path of chromium. Skips the test where one of them is missing."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("NOT RUN: pages in a browser, because chromium is not installed")
    if (_PACKAGES / ".ready").exists() and str(_PACKAGES) not in sys.path:
        sys.path.append(str(_PACKAGES))
    try:
        return importlib.import_module("playwright.sync_api"), chromium
    except ImportError:
        pytest.skip("NOT RUN: pages in a browser; it needs `make page-driver`")
