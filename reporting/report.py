"""The page: sections in order, the style sheet, the script, and the data that the maps draw."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from moec.manifests.bundle import BundleManifest
from moec.manifests.errors import ManifestInvalid

from .curves import Curve
from .figures.losses import loss_section, promise_section, trials_section
from .figures.maps import map_section, maps_of
from .figures.replay import CacheRow, TokenTimeline, cache_section, timeline_section
from .text import page_file

MAX_PAGE_BYTES = 400_000
"""Size of a page for a model of 48 layers with 128 experts, bytes."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True, slots=True)
class Replayed:
    """Results of replaying a trace.

    device: name of the device whose rates the timeline has.
    rows: hit rate and bytes per token, by cache size and policy.
    token: reads and computing of one token; None if the trace has no decoded token.
    """

    device: str
    rows: Sequence[CacheRow]
    token: TokenTimeline | None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the page shows.

    manifest: manifest of the bundle.
    quality: content of quality.json; None or empty if nothing was measured.
    replayed: what a trace says; None without a trace.
    curves: further curves of bytes and loss.
    """

    manifest: BundleManifest
    quality: Mapping[str, Any] | None
    replayed: Replayed | None = None
    curves: Sequence[Curve] = field(default=())


def report_page(report: Report) -> str:
    """Return the page as HTML. Equal reports give equal pages.

    Raises ManifestInvalid if quality.json lacks what the page shows.
    """
    try:
        return _page(report)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError, OverflowError) as problem:
        raise ManifestInvalid(
            f"`quality.json` does not have the form of a certificate: {problem!r}", "compile the bundle again"
        ) from problem


def _page(report: Report) -> str:
    manifest, quality = report.manifest, report.quality or None
    title = f"{manifest.name}: report of a bundle"
    maps = maps_of(manifest, quality)
    sections = [promise_section(manifest, quality)]
    if quality is not None:
        sections.append(loss_section(quality, report.curves))
    sections.append(map_section(maps))
    rows = () if report.replayed is None else report.replayed.rows
    sections.append(cache_section(rows))
    token = None if report.replayed is None else report.replayed.token
    sections.append(timeline_section(token, "" if report.replayed is None else report.replayed.device))
    if quality is not None:
        sections.append(trials_section(quality))
    data = json.dumps(maps.to_plain(), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="generator" content="moec">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{escape(title)}</title>",
            f"<style>{page_file('report.css')}</style>",
            "</head>",
            "<body>",
            "<main>",
            f"<h1>{escape(manifest.name)}</h1>",
            *sections,
            f"<footer>Made by {escape(manifest.producer)} from <code>moec.json</code> and <code>quality.json</code>. "
            "The page needs no network.</footer>",
            "</main>",
            f'<script type="application/json" id="map-data">{data}</script>',
            f"<script>{page_file('report.js')}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )
