"""Requested experts are read before advised ones, and a prompt reads no expert twice, with both caches."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moec.runtime import Engine, load
from moec.runtime.engine import engine as engine_module
from moec.runtime.expert_cache.python_cache import PythonCache
from moec.runtime.options.runtime import Prefetch, PrefetchRule
from moec.runtime.prefetch.advisor import advised_experts
from moec.runtime.storage.interface import page_bytes
from moec.runtime.storage.read_storage import ReadStorage
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


CONTEXT = 64
PROMPT = [(7 * at * at + 5 * at + 3) % 250 + 3 for at in range(40)]


def open_small(bundle: Path, kind: Kind, prefetch: Prefetch, rule: PrefetchRule = "likely") -> Engine:
    """Room for 40 % of the experts, none of which is there."""
    limits = {"expert_cache": "40%", "context": CONTEXT, "cache_state": "cold"}
    with caches_of(kind):
        engine = load(bundle, **limits, prefetch=prefetch, prefetch_rule=rule, readers=2)
    assert isinstance(engine.cache, kind)
    return engine


@pytest.fixture
def read_by_python(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the reads of each expert by Python. The extension does most reads itself."""
    counts, load_some = Counter[int](), ReadStorage.load

    def counted(storage: ReadStorage, *run: int) -> None:
        counts.update(run)
        load_some(storage, *run)

    monkeypatch.setattr(ReadStorage, "load", counted)
    return counts


@both_caches
@pytest.mark.parametrize("prefetch", ["off", "lookahead", "path", "popularity"])
def test_a_prompt_reads_no_expert_twice(
    tiny_bundle: Path,
    read_by_python: Counter[int],
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    prefetch: Prefetch,
) -> None:
    """No expert is read ahead for the token after it, of which nothing is known.

    On a busy machine every advised expert can be requested before a reader takes it: advice is counted, not its reads.
    The extension gives its advice itself.
    """
    advised, give_advice = list[int](), kind.prefetch

    def noted(cache: Any, indices: Sequence[int]) -> None:
        advised.extend(indices)
        give_advice(cache, indices)

    monkeypatch.setattr(kind, "prefetch", noted)
    with open_small(tiny_bundle, kind, prefetch) as engine:
        engine.prefill(PROMPT)
    stored, stats = engine.bundle.manifest.experts, engine.cache.stats
    assert stats.rereads == 0 and stats.evictions > 0
    assert 0.8 * len(stored) < stats.lookups <= stats.reads <= len(stored)
    assert stats.bytes_read <= sum(page_bytes(entry.size_bytes) for entry in stored)
    assert stats.prefetch_reads == 0 or prefetch != "off"
    if kind is PythonCache:
        assert bool(advised) == (prefetch != "off") and stats.prefetch_reads <= len(advised)
        assert len(read_by_python) == stats.reads and set(read_by_python.values()) == {1}


@both_caches
def test_a_prompt_token_by_token_would_read_them_again(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    monkeypatch.setattr(engine_module, "MAX_PASS_TOKENS", 1)
    with open_small(tiny_bundle, kind, "off") as engine:
        engine.prefill(PROMPT)
        assert engine.cache.stats.rereads > len(engine.bundle.manifest.experts)


def test_a_rule_that_reads_for_the_next_token_reads_for_one(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads for the first layer, after the last layer of the prompt."""
    advised, prefetch = list[list[int]](), PythonCache.prefetch

    def noted(cache: PythonCache, indices: Sequence[int]) -> None:
        advised.append(list(indices))
        prefetch(cache, indices)

    monkeypatch.setattr(PythonCache, "prefetch", noted)
    with open_small(tiny_bundle, PythonCache, "lookahead", rule="spread") as engine:
        top_k = engine.bundle.manifest.model.layers[0].experts.top_k
        engine.prefill(PROMPT)
    assert len(advised[-1]) == advised_experts(top_k, 1) and len(advised) == len(engine.model.spec.layers)
    assert set(advised[-1]) <= set(range(engine.model.first_expert[1]))
