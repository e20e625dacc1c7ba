"""Replays of a trace for `moec report`: caches of several sizes, and one token event by event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from .predictions import Simulation
from .simulated_device import device_rates
from .traces import open_traces, replayed_bundle

if TYPE_CHECKING:
    from moec.profiles.device import DeviceProfile
    from moec.reporting.figures.replay import TokenTimeline
    from moec.reporting.report import Replayed
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.simulation.timeline import Event

CACHE_SHARES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
POLICIES = ("lrfu", "lru", "lfu", "hobbit", "edgemoe", "optimum")
READERS = 2


def replayed_for_report(bundle: Bundle, path: Path, profile: DeviceProfile | None, cache_share: float) -> Replayed:
    """Replay a trace with caches of several sizes, and one of its tokens event by event.

    profile: device whose rates count; None: the machine of the trace.
    cache_share: size of the cache of that token, as a share of all routed experts.
    Raises InputError for a trace of another model, OptionError for a cache that is too small.
    """
    from moec.reporting.figures.replay import CacheRow
    from moec.reporting.report import Replayed
    from moec.runtime.simulation.recorded_advice import recorded_advice

    (trace,) = open_traces([path], bundle)
    rates = device_rates(trace.header, profile, READERS, None, None)
    replayed = replayed_bundle(bundle)
    simulation = Simulation(bundle, trace, replayed, rates, trace.header.prefetch, recorded_advice)
    least = replayed.minimum_bytes / replayed.total_bytes
    shares = [share for share in CACHE_SHARES if share >= least]
    capacities = [int(replayed.total_bytes * share) for share in shares]
    rows = simulation.rows(capacities, {policy: policy for policy in POLICIES}, [{}])
    cache_rows = [
        CacheRow(
            line.capacity_bytes / replayed.total_bytes,
            line.policy,
            line.cache.hit_rate,
            line.decode_bytes_read_per_token,
        )
        for line in (row.timeline for row in rows)
    ]
    events: list[Event] = []
    watched = replace(simulation, watch=events.append)
    watched.rows(
        [max(replayed.minimum_bytes, int(replayed.total_bytes * cache_share))], {POLICIES[0]: POLICIES[0]}, [{}]
    )
    name = "the recording machine" if profile is None else profile.name
    return Replayed(name, cache_rows, median_token(events, trace.prompt_passes, cache_share))


def median_token(events: Sequence[Event], prompt_passes: int, cache_share: float) -> TokenTimeline | None:
    """Return the decoded token of median time, or None without one.

    events: all events of a replay. Each pass ends with the event of its head.
    """
    from moec.reporting.figures.replay import Span, TokenTimeline

    ends = [event.end_ns for event in events if event.kind == "head"]
    steps = [(later - earlier, earlier, later) for earlier, later in pairwise(ends)]
    decoded = sorted(steps[max(0, prompt_passes - 1) :])
    if not decoded:
        return None
    total_ns, begin_ns, end_ns = decoded[(len(decoded) - 1) // 2]
    spans = [
        Span(event.kind, max(0, event.begin_ns - begin_ns), min(total_ns, event.end_ns - begin_ns), event.layer)
        for event in events
        if event.end_ns > begin_ns and event.begin_ns < end_ns
    ]
    waited_ns = sum(span.end_ns - span.begin_ns for span in spans if span.kind == "wait")
    return TokenTimeline(total_ns, waited_ns, cache_share, spans)
