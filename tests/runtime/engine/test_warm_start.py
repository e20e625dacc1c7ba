"""The warm start and several readers: after demand, within the capacity, and harmless if reads fail."""

from __future__ import annotations

import threading

import pytest

from moec.manifests.errors import StorageReadFailed
from tests.runtime.faulty_source import InTime, each, make_cache, wait_for, warmed


def test_the_warm_start_leaves_out_what_cannot_be_read(in_time: InTime) -> None:
    source, cache = make_cache([10] * 4, 40)
    source.failing = {2}
    warmed(cache, [0, 2, 1])
    cache.check_invariants()
    assert source.loaded == {0, 1} and each(cache.stream(0, [0, 1])) == [0, 1]
    with pytest.raises(StorageReadFailed, match="expert 2"):
        in_time(lambda: each(cache.stream(0, [2])))
    assert (cache.stats.warm_reads, cache.stats.reads, cache.stats.hits) == (2, 0, 2)
    cache.close()


def test_demand_overtakes_the_warm_start(in_time: InTime) -> None:
    source, cache = make_cache([10] * 8, 80)
    source.gate.clear()
    cache.warm(range(7))
    in_time(lambda: wait_for(lambda: cache.is_loading_or_resident(0)))
    stream = cache.stream(0, [7])
    found = threading.Thread(target=lambda: each(stream))
    found.start()
    in_time(lambda: wait_for(lambda: 7 in cache.leased()))
    source.gate.set()
    in_time(found.join)
    in_time(cache.finish_warming)
    assert source.reads[:2] == [0, 7] and sorted(source.reads) == list(range(8))
    assert cache.stats.busy_ns > 0
    cache.close()


def test_several_readers_read_side_by_side(in_time: InTime) -> None:
    source, cache = make_cache([10] * 6, 60, readers=3)
    source.gate.clear()
    stream = cache.stream(0, [0, 1, 2, 3])
    waiting = threading.Thread(target=lambda: each(stream))
    waiting.start()
    in_time(lambda: wait_for(lambda: sum(map(cache.is_loading_or_resident, range(4))) == 3))
    source.gate.set()
    in_time(waiting.join)
    cache.check_invariants()
    assert sorted(source.reads) == [0, 1, 2, 3] and source.complaints == []
    cache.close()
