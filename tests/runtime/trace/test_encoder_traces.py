"""A recorded run of a model with an encoder, replayed: the simulated cache does what the engine's did."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from moec.runtime import load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.expert_cache.cache_spec import CacheSpec
from moec.runtime.expert_cache.policies import SCORES
from moec.runtime.expert_cache.records import bundle_records, warm_order
from moec.runtime.expert_cache.residency import Residency
from moec.runtime.simulation.recorded_advice import table_advice
from moec.runtime.simulation.replay import replay
from moec.runtime.simulation.timeline import DeviceRates, predict_timeline
from moec.runtime.storage.interface import page_bytes
from moec.runtime.trace.trace import Trace, TraceHeader, TraceRecorder
from tests.gates.bundles import emit_bundle
from tests.tiny_models import VOCABULARY
from tests.tiny_switch import TinySwitch, save_tiny_switch

PROMPT = np.random.default_rng(5).integers(3, VOCABULARY, 40).tolist()
TOKENS = np.random.default_rng(6).integers(3, VOCABULARY, 20).tolist()
RATES = DeviceRates(storage_bytes_per_s=10**8, storage_latency_ns=10**5, readers=2, compute_scale=1.0)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layer routes; some tokens of the encoder find their expert full."""
    routed = {"num_layers": 3, "num_sparse_encoder_layers": 3, "num_decoder_layers": 3, "num_sparse_decoder_layers": 3}
    tiny = TinySwitch({**routed, "num_experts": 6, "expert_capacity": 9}, seed=4)
    folder = save_tiny_switch(tmp_path_factory.mktemp("traced") / "model", tiny)
    return emit_bundle(folder, folder.with_name("bundle"), bitwidth=4, mixed=True)


def record(path: Path, policy: str, experts: int, prefetch: str = "off") -> tuple[Trace, dict[str, int], int]:
    """One prompt and forced tokens with room for so many experts: the trace, what the cache counted, its capacity."""
    manifest = open_bundle(path).manifest
    layers, room = manifest.model.layers, experts * max(page_bytes(entry.size_bytes) for entry in manifest.experts)
    with load(path, expert_cache=f"{room}", policy=policy, prefetch=prefetch, readers=1, context=64) as engine:
        engine.cache.finish_warming()
        before = engine.cache.stats.copy()
        first = manifest.model.first_decoder_layer
        trace = engine.model.trace = TraceRecorder(engine.model.times, lambda: engine.cache.stats, first)
        engine.begin_texts([0], [PROMPT])
        for position, token in enumerate(TOKENS):
            engine.model.logits(engine.step([token], [0], [position]))
        trace.end()
        counted = engine.cache.stats.since(before).replayable_counts()
        counts = tuple(layer.experts.count for layer in layers)
        top_k = tuple(layer.experts.top_k for layer in layers)
        header = TraceHeader("0" * 64, counts, top_k, len(PROMPT), prefetch, 1, 1, 1, 1, first, prefetch_rule="likely")  # type: ignore[arg-type]
        return Trace(header, tuple(trace.passes)), counted, engine.cache.capacity_bytes


@pytest.mark.parametrize("policy", SCORES)
def test_a_replay_counts_what_the_engine_counted(bundle: Path, policy: str) -> None:
    trace, counted, capacity = record(bundle, policy, 14)
    opened = open_bundle(bundle)
    entries = opened.manifest.experts
    sizes = np.array([page_bytes(entry.size_bytes) for entry in entries], np.int64)
    records = bundle_records(opened, opened.tables(), entries)
    found = replay(
        trace.accesses(), CacheSpec(sizes, capacity, records), policy, warm_order(records).tolist()
    ).replayable_counts()
    assert counted["evictions"] > 0
    for name in ("lookups", "hits", "misses", "evictions", "bytes_read"):
        assert found[name] == counted[name], name


def test_experts_of_the_encoder_are_read_once_and_go_first(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, _, capacity = record(bundle, "lrfu", 8)
    opened = open_bundle(bundle)
    entries, first = opened.manifest.experts, opened.manifest.model.first_decoder_layer
    sizes = np.array([page_bytes(entry.size_bytes) for entry in entries], np.int64)
    records = bundle_records(opened, opened.tables(), entries)
    reads, gone = Counter[int](), list[int]()
    arrive, evict = Residency.arrive, Residency.evict

    def arrive_and_count(self: Residency, index: int) -> None:
        reads[index] += 1
        arrive(self, index)

    def evict_and_tell(self: Residency, index: int) -> None:
        gone.append(entries[index].layer)
        evict(self, index)

    monkeypatch.setattr(Residency, "arrive", arrive_and_count)
    monkeypatch.setattr(Residency, "evict", evict_and_tell)
    replay(trace.accesses(), CacheSpec(sizes, capacity, records), "lrfu", warm_order(records).tolist())
    assert {count for index, count in reads.items() if entries[index].layer < first} == {1}
    last = max(at for at, layer in enumerate(gone) if layer < first)
    assert last + 1 < len(gone), "the decoder evicts its own once the encoder's are gone"
    assert all(layer < first for layer in gone[: last + 1])


@pytest.mark.parametrize("kind", ["path", "popularity"])
def test_tables_advise_in_both_stacks(bundle: Path, kind: str) -> None:
    """Replayed advice of table predictors equals the recorded advice, layer by layer."""
    trace, _, capacity = record(bundle, "lrfu", 8, prefetch=kind)
    opened = open_bundle(bundle)
    advice = table_advice(kind, opened.tables(), opened.manifest.model, trace)  # type: ignore[arg-type]
    for each in trace.passes:
        for at, recorded in enumerate(each.advice):
            assert tuple(advice(each, each.first_layer + at)) == recorded
    entries = opened.manifest.experts
    sizes = np.array([page_bytes(entry.size_bytes) for entry in entries], np.int64)
    records = bundle_records(opened, opened.tables(), entries)
    found = predict_timeline(trace, CacheSpec(sizes, capacity, records, capacity // 2), "lrfu", RATES, advice)
    assert found.cache.prefetch_reads > 0 and found.tokens == len(TOKENS)
