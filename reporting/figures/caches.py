"""Hit rate and bytes per token over the size of the expert cache, by policy, with the offline optimum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..svg.chart import Chart, Point, Series
from ..svg.scale import Scale
from ..text import figure, note, section, share_text, short_share, size_text, size_unit

OPTIMUM = "optimum"
_WITHOUT_TRACE = (
    "No trace was given. Record one on the device with `moec bench BUNDLE --text FILE --expert-cache 50% "
    "--trace-out FILE`, and add `--trace FILE` to the report."
)


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
