"""Figures of a replayed trace: what a cache keeps, by policy, and the reads and computing of one token.

The caches have hit rate and bytes per token over their size, with the offline optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from ..svg.chart import WIDTH, Chart, Point, Scale, Series
from ..text import figure, note, section, share_text, short_share, size_text, size_unit

OPTIMUM = "optimum"
_WITHOUT_TRACE = (
    "No trace was given. Record one on the device with `moec bench BUNDLE --text FILE --expert-cache 50% "
    "--trace-out FILE`, and add `--trace FILE` to the report."
)
Kind = Literal["dense", "experts", "shared", "head", "wait", "read", "ahead"]
_LANES = (("computing", ("dense", "experts", "shared", "head")), ("waiting", ("wait",)), ("reading", ("read", "ahead")))
_NAMES = {
    "dense": "attention and other dense weights",
    "experts": "experts",
    "shared": "shared expert",
    "head": "logits",
    "wait": "waiting for experts",
    "read": "read that a layer waits for",
    "ahead": "read ahead",
}
_LEFT, _TOP, _LANE, _GAP, _BOTTOM = 80, 22, 34, 10, 40
_MOST_SPANS = 4000


@dataclass(frozen=True, slots=True)
class CacheRow:
    """One replay of a trace.

    share: size of the cache as a share of all routed experts.
    policy: which expert is evicted first; OPTIMUM knows the future.
    hit_rate: share of lookups that found their expert.
    read_bytes_per_token: bytes read for each decoded token.
    """

    share: float
    policy: str
    hit_rate: float
    read_bytes_per_token: float


def cache_section(rows: Sequence[CacheRow]) -> str:
    """Return the section of what a cache keeps, or why it is missing."""
    if not rows:
        return section("cache", "What a memory budget does", note(_WITHOUT_TRACE))
    hits = cache_chart(rows, lambda row: row.hit_rate, "hit rate", lambda value: share_text(value, 1), short_share, 1.0)
    most = max(row.read_bytes_per_token for row in rows)
    read = cache_chart(
        rows,
        lambda row: row.read_bytes_per_token,
        "bytes read per token",
        size_text,
        size_text,
        most or 1.0,
        size_unit(most),
    )
    return section(
        "cache",
        "What a memory budget does",
        figure(
            hits.to_svg(),
            "Share of lookups that find their expert in memory, by the size of the cache. The optimum evicts with "
            "knowledge of the future, so no policy can exceed it.",
        ),
        figure(read.to_svg(), "Bytes read from storage for each decoded token."),
    )


def cache_chart(
    rows: Sequence[CacheRow],
    value: Callable[[CacheRow], float],
    label: str,
    text: Callable[[float], str],
    tick: Callable[[float], str],
    most: float,
    unit: float = 1.0,
) -> Chart:
    """Return a chart over the size of the cache, with a line for each policy.

    text, tick: text of a value in full, and at a tick.
    most: value at the upper end.
    unit: ticks are round multiples of it.
    """
    policies = list(dict.fromkeys(row.policy for row in rows))
    series = []
    for number, policy in enumerate(policies):
        rows_of_policy = [row for row in rows if row.policy == policy]
        points = [
            Point(row.share, value(row), f"{policy}, {row.share:.0%}: {text(value(row))}") for row in rows_of_policy
        ]
        series.append(Series(policy, points, number % 7, "dot", is_line=True, is_dashed=policy == OPTIMUM))
    x = Scale(0.0, 1.0, "cache, share of all routed experts", short_share)
    y = Scale(0.0, 1.03 * most, label, tick, unit=unit)
    return Chart(f"{label} by size of the cache", x, y, series)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that takes time.

    kind: what happens.
    begin_ns, end_ns: from the begin of the token.
    layer: layer that computes, waits, or will use what is read; None for the head.
    """

    kind: Kind
    begin_ns: int
    end_ns: int
    layer: int | None


@dataclass(frozen=True, slots=True)
class TokenTimeline:
    """One decoded token.

    total_ns: its time.
    wait_ns: time in which a layer waited for reads.
    cache_share: size of the cache as a share of all routed experts.
    spans: what happened.
    """

    total_ns: int
    wait_ns: int
    cache_share: float
    spans: Sequence[Span]


def timeline_section(token: TokenTimeline | None, device: str) -> str:
    """Return the section of one token, or why it is missing."""
    title = "One token"
    if token is None:
        return section("token", title, note("A timeline needs a trace with at least one decoded token (`--trace`)."))
    waited = token.wait_ns / max(token.total_ns, 1)
    caption = (
        f"The decoded token of median time on {device}, with a cache of {token.cache_share:.0%} of the experts: "
        f"{token.total_ns / 1e6:.2f} ms, of it {waited:.0%} waiting. The times of the trace are replayed with the "
        "rates of this device."
    )
    return section("token", title, figure(timeline_svg(token), caption))


def timeline_svg(token: TokenTimeline) -> str:
    """Return the lanes of one token as an SVG element."""
    scale = Scale(0.0, max(token.total_ns, 1) / 1e6, "ms", lambda value: f"{value:g}")
    height = _TOP + len(_LANES) * (_LANE + _GAP) + _BOTTOM + 36
    bottom = _TOP + len(_LANES) * (_LANE + _GAP)
    parts = []
    for value in scale.ticks():
        at = _x(scale, value * 1e6)
        parts.append(f'<path class="grid" d="M{at} {_TOP}V{bottom}"/>')
        text = f"{scale.text(round(value, 9))} ms"
        parts.append(f'<text class="tick" x="{at}" y="{bottom + 15}" text-anchor="middle">{text}</text>')
    for number, (name, kinds) in enumerate(_LANES):
        top = _TOP + number * (_LANE + _GAP)
        parts.append(f'<text class="label" x="{_LEFT - 8}" y="{top + 21}" text-anchor="end">{name}</text>')
        rows = side_by_side([span for span in token.spans if span.kind in kinds][:_MOST_SPANS])
        height_of_row = _LANE / max(1, len(rows))
        for row, spans in enumerate(rows):
            parts += [_rect(scale, span, top + row * height_of_row, height_of_row) for span in spans]
    parts += _layers(scale, token.spans)
    parts += _legend(token.spans, bottom + 36)
    return (
        f'<svg class="chart timeline" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="Reads and computing of one token">{"".join(parts)}</svg>'
    )


def _x(scale: Scale, at_ns: float) -> float:
    return round(_LEFT + min(1.0, max(0.0, scale.share(at_ns / 1e6))) * (WIDTH - _LEFT - 12), 2)


def side_by_side(spans: Sequence[Span]) -> list[list[Span]]:
    """Return the spans in as few rows as needed, so that none overlaps another in its row."""
    rows = list[list[Span]]()
    for span in sorted(spans, key=lambda timed: (timed.begin_ns, timed.end_ns)):
        free = next((row for row in rows if row[-1].end_ns <= span.begin_ns), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def _rect(scale: Scale, span: Span, top: float, height: float) -> str:
    begin, end = _x(scale, span.begin_ns), _x(scale, span.end_ns)
    where = "" if span.layer is None else f", layer {span.layer}"
    title = f"{_NAMES[span.kind]}{where}: {(span.end_ns - span.begin_ns) / 1e3:.0f} us"
    return (
        f'<rect class="span {span.kind}" x="{begin}" y="{round(top, 2)}" width="{max(0.4, round(end - begin, 2))}" '
        f'height="{round(height, 2)}"><title>{escape(title)}</title></rect>'
    )


def _layers(scale: Scale, spans: Sequence[Span]) -> list[str]:
    """Return the number of each layer where it begins, as far as numbers fit next to each other."""
    parts, last = list[str](), -100.0
    for span in spans:
        if span.kind == "dense" and span.layer is not None:
            at = _x(scale, span.begin_ns)
            if at - last >= 16:
                parts.append(f'<text class="tick" x="{at}" y="{_TOP - 7}">{span.layer}</text>')
                last = at
    return parts


def _legend(spans: Sequence[Span], y: float) -> list[str]:
    """Return the names of the kinds that occur."""
    parts, x = list[str](), float(_LEFT)
    for kind, name in _NAMES.items():
        if any(span.kind == kind for span in spans):
            if x + 30 + 6.1 * len(name) > WIDTH:
                x, y = float(_LEFT), y + 18
            parts.append(f'<rect class="span {kind}" x="{x}" y="{y}" width="12" height="12"/>')
            parts.append(f'<text class="legend" x="{x + 16}" y="{y + 10}">{name}</text>')
            x += 30 + 6.1 * len(name)
    return parts
