"""Requested experts are read before advised ones, by the cache in the extension and by the one in Python."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from moec.runtime import load
from moec.runtime.storage.interface import page_bytes
from moec.runtime.storage.readers import LOW_PRIORITY
from tests.runtime.cache_kinds import Kind, both_caches, caches_of
from tests.runtime.faulty_source import PATIENCE_S, InTime, each, wait_for

ADVISED = [6, 9, 13, 16]
"""Of three layers of six experts those that are no neighbours: each is read alone."""


@both_caches
@pytest.mark.parametrize(
    "layer, asked, order",
    [
        (0, [0, 3], [6, 0, 3, 9, 13, 16]),
        (2, [16], [6, 16, 9]),  # advised itself; the other one of its layer was guessed wrong
    ],
)
def test_demand_overtakes_advice(
    tiny_bundle: Path,
    in_time: InTime,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    layer: int,
    asked: list[int],
    order: list[int],
) -> None:
    """Advice is queued after a read that is held. Demand is requested later."""
    options: dict[str, Any] = {"expert_cache": "100%", "context": 8, "readers": 1, "cache_state": "cold"}
    with caches_of(kind), load(tiny_bundle, **options) as engine:
        assert isinstance(engine.cache, kind)
        cache, gate, reads, read = engine.cache, threading.Event(), list[int](), engine.storage.load

        def held(*run: int) -> None:
            reads.extend(run)
            gate.wait(PATIENCE_S)
            read(*run)

        monkeypatch.setattr(engine.storage, "load", held)
        cache.prefetch(ADVISED)
        in_time(lambda: wait_for(lambda: bool(reads)))
        assert reads == ADVISED[:1] and not any(cache.is_loading_or_resident(index) for index in ADVISED[1:])
        stored = engine.bundle.manifest.stored_experts
        assert cache.used_bytes == sum(page_bytes(stored[index].size_bytes) for index in ADVISED), "all are queued"
        asking = threading.Thread(target=lambda: each(cache.stream(layer, asked)))
        asking.start()
        in_time(lambda: wait_for(lambda: set(asked) <= set(cache.leased().tolist())))
        gate.set()
        in_time(asking.join)
        in_time(lambda: wait_for(lambda: len(reads) == len(order)))
        assert reads == order


@both_caches
def test_with_a_reader_of_its_own_advice_delays_no_demand(
    tiny_bundle: Path, in_time: InTime, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """Advice is held until the requested experts are there. Its reader has a lower priority."""
    options: dict[str, Any] = {"expert_cache": "100%", "context": 8, "readers": 1, "cache_state": "cold"}
    with caches_of(kind), load(tiny_bundle, **options, prefetch_rule="until-routed") as engine:
        cache, gate, read = engine.cache, threading.Event(), engine.storage.load
        readers = dict[int, int]()

        def held(*run: int) -> None:
            own = threading.get_native_id()
            readers.update(dict.fromkeys(run, os.getpriority(os.PRIO_PROCESS, own)))
            if set(run) <= set(ADVISED):
                gate.wait(PATIENCE_S)
            read(*run)

        monkeypatch.setattr(engine.storage, "load", held)
        cache.prefetch(ADVISED)
        in_time(lambda: wait_for(lambda: bool(readers)))
        stored = [engine.bundle.manifest.stored_experts[index] for index in ADVISED]
        two = sum(page_bytes(entry.size_bytes) for entry in stored[:2])
        assert cache.used_bytes == two, "one is read and one is queued; the others take no room"
        in_time(lambda: each(cache.stream(0, [0, 3])))
        assert set(readers) == {ADVISED[0], 0, 3}
        gate.set()
        in_time(lambda: wait_for(lambda: {*ADVISED} <= set(cache.resident().tolist())))
        assert {readers[index] for index in ADVISED} == {max(LOW_PRIORITY, readers[0])}
        assert cache.running_readers == 2
