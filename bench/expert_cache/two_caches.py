"""One cache for both versions of experts, or one for each.

    python -m bench.expert_cache.two_caches BUNDLE TRACE

Takes a minute. Replays an exact trace of a bundle with low versions under dynamic precision. The budget is one cache
under one score, or it is divided as in HOBBIT, for several shares of the high versions. Prints a Markdown table: bytes
read per token, and the shares of chosen experts that are computed low or skipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moec.cli.simulation.traces import ReplayedBundle, open_traces, replayed_bundle
from moec.manifests.errors import MemoryBudgetExceeded
from moec.runtime.bundle.open_bundle import Bundle, open_bundle
from moec.runtime.expert_cache.cache_spec import CacheSpec
from moec.runtime.expert_cache.policies import SCORES
from moec.runtime.expert_cache.records import ExpertRecords
from moec.runtime.modes.expert_choice import Versions, low_version_indices
from moec.runtime.modes.logical_cache import LogicalCache
from moec.runtime.options.lossy import parse_modes
from moec.runtime.prefetch.advisor import Advisor
from moec.runtime.simulation.lossy_replay import RecordedPredictor, TracedModel, replay_modes
from moec.runtime.simulation.recorded_advice import no_advice
from moec.runtime.trace.trace import Trace

SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
THRESHOLDS = ("0,1", "0.4,0.8", "0.6,0.9")


def records_of(records: ExpertRecords, experts: slice) -> ExpertRecords:
    """Return the records of some experts as if each had one version only."""
    arrays = {
        name: getattr(records, name)[experts].copy() for name in ("layer", "frequency", "last_used", "uses", "heat")
    }
    return replace(records, **arrays, expert=None)


class DividedCache(LogicalCache):
    """A cache of high versions and one of low versions. Indices of low versions follow those of high ones."""

    def __init__(self, replayed: ReplayedBundle, capacity_bytes: int, high_share: float, room_bytes: int) -> None:
        self.count, high = replayed.count, round(capacity_bytes * high_share)
        parts = []
        for capacity, numbers in ((high, slice(0, self.count)), (capacity_bytes - high, slice(self.count, None))):
            start = numbers.start or 0
            warm = [index - start for index in replayed.warm if start <= index < len(replayed.sizes[numbers]) + start]
            cached_records = records_of(replayed.records, numbers)
            pins = max(0, min(room_bytes, capacity - int(replayed.sizes[numbers].max())))
            spec = CacheSpec(replayed.sizes[numbers], capacity, cached_records, pins)
            parts.append(LogicalCache(spec, SCORES["lrfu"], warm))
        self.high, self.low = parts

    def _split(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        return [i for i in indices if i < self.count], [i - self.count for i in indices if i >= self.count]

    def is_resident(self, index: int) -> bool:
        return self.high.is_resident(index) if index < self.count else self.low.is_resident(index - self.count)

    def request(self, layer: int, experts: Sequence[int], advice: Sequence[int] = ()) -> None:
        for cache, wanted, ahead in zip((self.high, self.low), self._split(experts), self._split(advice), strict=True):
            cache.request(layer, wanted, ahead)

    def advise(self, advice: Sequence[int]) -> None:
        for cache, ahead in zip((self.high, self.low), self._split(advice), strict=True):
            cache.advise(ahead)

    def begin_sequence(self) -> None:
        self.high.begin_sequence()
        self.low.begin_sequence()

    @property
    def bytes_read(self) -> int:
        return self.high.bytes_read + self.low.bytes_read


def replayed_row(bundle: Bundle, trace: Trace, replayed: ReplayedBundle, thresholds: str, cache: LogicalCache) -> str:
    """Return the columns of one replay: MiB per token, share low, share skipped."""
    spec, header = bundle.manifest.model, trace.header
    predictor = RecordedPredictor(spec) if header.prefetch == "lookahead" else None
    advisor = Advisor(
        spec, header.first_expert, predictor, header.prefetch_layers, header.prefetch_experts, header.prefetch_rule
    )
    model = TracedModel(spec, header.first_expert, replayed.sizes, advisor)
    versions = Versions(model.first_expert, low_version_indices(bundle.manifest))
    _, counts = replay_modes(trace, parse_modes(thresholds, None, None), model, versions, cache, no_advice)
    tokens = len(trace.passes) - trace.prompt_passes
    chosen = tokens * sum(header.top_k)
    return f"{cache.bytes_read / tokens / 2**20:.3f} | {counts.low / chosen:.3f} | {counts.skipped / chosen:.3f}"


def main() -> None:
    """Read the command line and print one row per setting."""
    parser = argparse.ArgumentParser(description="One cache for both versions of experts, or one for each.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("trace", type=Path)
    options = parser.parse_args()
    bundle = open_bundle(options.bundle)
    (trace,) = open_traces([options.trace], bundle)
    replayed = replayed_bundle(bundle)
    print("| experts in memory | thresholds | cache | MiB read per token | low | skipped |")
    print("|---|---|---|---|---|---|")
    for share in (0.25, 0.5):
        capacity = replayed.capacity_bytes(share)
        if capacity is None:
            continue
        room = capacity - replayed.minimum_bytes
        for thresholds in THRESHOLDS:
            one = LogicalCache(replayed.cache_spec(capacity), SCORES["lrfu"], replayed.warm)
            row = replayed_row(bundle, trace, replayed, thresholds, one)
            print(f"| {share:.0%} | {thresholds} | one | {row} |", flush=True)
            for high in SHARES:
                try:
                    divided = DividedCache(replayed, capacity, high, room)
                    row = replayed_row(bundle, trace, replayed, thresholds, divided)
                except MemoryBudgetExceeded:
                    row = "does not hold a layer | |"
                print(f"| {share:.0%} | {thresholds} | {high:.0%} high | {row} |", flush=True)


if __name__ == "__main__":
    main()
