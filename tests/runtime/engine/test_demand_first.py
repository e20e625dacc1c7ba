"""Requested experts are read before advised ones, by the cache in the extension and by the one in Python."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from moec.runtime import kernels, load
from moec.runtime.expert_cache.interface import StreamingCache
from moec.runtime.expert_cache.native_cache import NativeCache
from moec.runtime.expert_cache.python_cache import PythonCache
from moec.runtime.options.runtime import Policy
from moec.runtime.storage.interface import page_bytes
from tests.runtime.faulty_source import PATIENCE_S, InTime, each, wait_for

ADVISED = [6, 9, 13, 16]
"""Of three layers of six experts those that are no neighbours: each is read alone."""


@pytest.mark.parametrize("policy, kind", [("lrfu", NativeCache), ("edgemoe", PythonCache)])
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
    policy: Policy,
    kind: type[StreamingCache],
    layer: int,
    asked: list[int],
    order: list[int],
) -> None:
    """Advice is queued after a read that is held. Demand is requested later."""
    if kind is NativeCache and kernels.compiled() is None:
        pytest.skip("no extension")
    with load(tiny_bundle, expert_cache="100%", context=8, readers=1, cache_state="cold", policy=policy) as engine:
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
