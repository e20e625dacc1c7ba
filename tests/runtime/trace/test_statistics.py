"""Times and counts of a run, and how prefetched reads are counted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moec.runtime.expert_cache.cache_stats import CacheStats
from moec.runtime.memory.bandwidth import LEAST_BYTES, MOST_BYTES, buffer_bytes, read_bytes_per_s
from moec.runtime.trace.statistics import PhaseTimes, RunRecorder, quantile


def test_quantiles_are_values_that_occur() -> None:
    assert quantile([], 0.5) is None and quantile([7], 0.95) == 7
    assert quantile([4, 1, 3, 2], 0.5) == 2 and quantile(range(1, 101), 0.95) == 95
    assert quantile([1, 2, 3], 0.0) == 1 and quantile([1, 2, 3], 1.0) == 3


def test_the_first_token_counts_apart() -> None:
    recorder = RunRecorder(prompt_tokens=9)
    for elapsed_ns in (50_000_000, 10_000_000, 30_000_000, 10_000_000):
        recorder.add(elapsed_ns, CacheStats(lookups=4, hits=3, misses=1, bytes_read=4096, stall_ns=5))
    found = recorder.finish(prefetch_recall=0.5)
    assert (found.ttft_ns, found.tpot_p50_ns, found.tpot_p95_ns) == (50_000_000, 10_000_000, 30_000_000)
    assert found.tokens_per_s == pytest.approx(60) and found.tokens == 4
    assert (found.lookups, found.misses, found.bytes_read, found.stall_ns) == (16, 4, 16384, 20)
    assert found.hit_rate == 0.75 and found.bytes_read_per_token == 4096 and found.prefetch_precision is None
    assert found.to_plain()["prefetch_recall"] == 0.5


def test_shares_of_the_time_are_those_of_the_tokens_after_the_first() -> None:
    recorder = RunRecorder(prompt_tokens=9)
    for elapsed_ns, dense_ns in ((900, 800), (100, 30), (300, 50)):
        recorder.add(elapsed_ns, CacheStats(stall_ns=20), PhaseTimes(dense_ns, 60))
    shares = recorder.finish().decode_shares
    assert shares is not None
    assert (shares.stall, shares.experts, shares.dense, shares.other) == pytest.approx((0.1, 0.3, 0.2, 0.4))


def test_a_large_model_is_compared_with_memory_that_no_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.runtime.memory.bandwidth.available_memory_bytes", lambda: 20 << 30)
    assert MOST_BYTES == 4 << 30 == buffer_bytes(1 << 30) == buffer_bytes(1 << 40)
    assert buffer_bytes(100 << 20) == 100 << 20 and buffer_bytes(1) == LEAST_BYTES
    monkeypatch.setattr("moec.runtime.memory.bandwidth.available_memory_bytes", lambda: 2 << 30)
    assert buffer_bytes(1 << 40) == 1 << 30


def test_memory_is_read_at_a_rate_that_memory_has() -> None:
    assert 1e8 < read_bytes_per_s(LEAST_BYTES, 1) < 1e13


def test_a_run_without_tokens_has_no_times() -> None:
    found = RunRecorder(prompt_tokens=1).finish()
    assert found.ttft_ns is None and found.tpot_p50_ns is None and found.tokens_per_s is None


PEAK = """
import numpy as np
from moec.runtime.trace.statistics import peak_memory_bytes, reset_peak_memory
if not reset_peak_memory():
    raise SystemExit(77)
before = peak_memory_bytes()
block = np.ones(64 << 20, np.uint8)
grown = peak_memory_bytes() - before
del block
reset_peak_memory()
raise SystemExit(0 if grown >= 48 << 20 and peak_memory_bytes() < before + (32 << 20) else 1)
"""


def test_peak_memory_follows_what_is_touched() -> None:
    """In a process of its own: one that has freed much may give it back while it grows."""
    code = subprocess.run([sys.executable, "-c", PEAK], check=False).returncode
    if code == 77:
        pytest.skip("the system does not reset the peak")
    assert code == 0
