"""Models with an encoder: its experts are read once per pass, first, and go first, also in a replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.manifests.errors import ContextOverflow, ExecutionError, InputError
from moec.manifests.quant import QuantSpec
from moec.profiles.probe import resident_set_bytes
from moec.runtime import kernels, load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.engine.batch import forced_logits, generate_many
from moec.runtime.engine.engine import Engine
from moec.runtime.expert_cache.cache_spec import CacheSpec
from moec.runtime.expert_cache.eviction import eviction_order
from moec.runtime.expert_cache.policies import SCORES
from moec.runtime.expert_cache.python_cache import PythonCache
from moec.runtime.expert_cache.records import bundle_records, expert_records, warm_order
from moec.runtime.layers.attention import CrossAttention
from moec.runtime.layers.kv_cache import KVCache
from moec.runtime.layers.routing import within_capacity
from moec.runtime.simulation.recorded_advice import table_advice
from moec.runtime.simulation.replay import replay
from moec.runtime.simulation.timeline import DeviceRates, SimulatedMachine, predict_steps, timed_pass
from moec.runtime.storage.interface import page_bytes
from moec.runtime.trace.trace import Access, Trace, TraceHeader, TraceRecorder
from tests.gates.bundles import emit_bundle
from tests.kernels.packer import pack_16_bit
from tests.manifests.examples import CROSS, WITH_ENCODER
from tests.runtime.cache_kinds import caches_of
from tests.tiny_models import VOCABULARY
from tests.tiny_switch import START, Oracle, TinySwitch, save_tiny_switch

PROMPT = np.random.default_rng(5).integers(3, VOCABULARY, 60).tolist()
SHORT = PROMPT[10:17]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layer routes; some tokens find their expert full."""
    routed = {"num_layers": 4, "num_sparse_encoder_layers": 4, "num_decoder_layers": 3, "num_sparse_decoder_layers": 3}
    tiny = TinySwitch({**routed, "num_experts": 6, "expert_capacity": 9}, seed=4)
    return save_tiny_switch(tmp_path_factory.mktemp("encoder") / "model", tiny)


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    return emit_bundle(folder, folder.with_name("bundle"), bitwidth=4, mixed=True)


@contextmanager
def counted(engine: Engine) -> Iterator[Counter[int]]:
    """Count the reads of each expert within the block."""
    reads: Counter[int] = Counter()
    load_one = engine.storage.load

    def load_and_count(*run: int) -> None:
        reads.update(run)
        load_one(*run)

    engine.storage.load = load_and_count  # type: ignore[method-assign]
    yield reads
    engine.storage.load = load_one  # type: ignore[method-assign]


def recorder(engine: Engine) -> TraceRecorder:
    return TraceRecorder(engine.model.times, lambda: engine.cache.stats, engine.model.spec.first_decoder_layer)


def asked(trace: TraceRecorder, experts_per_layer: int = 6) -> list[Access]:
    trace.end()
    first_expert = [layer * experts_per_layer for layer in range(8)]
    return [access for each in trace.passes for access in each.accesses(first_expert)]


# -- experts of the encoder --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", ["off", "lookahead", "popularity"])
def test_an_expert_of_the_encoder_is_read_once_per_pass(bundle: Path, prefetch: str) -> None:
    """With room for one layer's experts, and from a cache that the decoder has filled.

    Every read of the cache in Python can be counted; the native one decides in the same way.
    """
    manifest = open_bundle(bundle).manifest
    first = manifest.model.first_decoder_layer
    encoder = {index for index, entry in enumerate(manifest.experts) if entry.layer < first}
    room = 3 * max(entry.size_bytes for entry in manifest.experts)
    # Random weights make popularity no guide, which the rule `likely` would find out.
    options: dict[str, Any] = {
        "expert_cache": f"{room}",
        "prefetch": prefetch,
        "prefetch_rule": "spread",
        "context": 128,
    }
    with caches_of(PythonCache), load(bundle, **options) as engine:
        engine.cache.finish_warming()
        for _ in range(3):
            trace = engine.model.trace = recorder(engine)
            with counted(engine) as reads:
                engine.begin_texts([0], [PROMPT])
            accesses = asked(trace)
            counts = Counter(layer for layer, _ in accesses)
            assert set(counts.values()) == {1} and max(counts) < first  # every layer asks once
            wanted = {manifest.experts[index].key for _, experts in accesses for index in experts}
            own = {index: count for index, count in reads.items() if index in encoder}
            assert own and set(own.values()) == {1}
            read = {manifest.experts[index].key for index in own}
            assert len(wanted) > 12 and (read <= {*wanted} or prefetch != "off")
            engine.model.trace = None
            for position in range(12):
                engine.step([PROMPT[position]], [0], [position])
        assert (engine.cache.stats.prefetch_used > 0) == (prefetch != "off")


def test_many_prompts_share_a_pass(bundle: Path) -> None:
    with load(bundle, expert_cache="100%", context=128, slots=3) as engine:
        trace = engine.model.trace = recorder(engine)
        assert engine.begin_texts([0, 1, 2], [PROMPT, SHORT, SHORT]) == [[START]] * 3
        accesses = asked(trace)
        assert accesses and max(Counter(layer for layer, _ in accesses).values()) == 1


@pytest.mark.parametrize("policy", SCORES)
def test_experts_of_the_encoder_go_first_those_that_are_over_before_those_to_come(policy: str) -> None:
    """Two layers of an encoder, two of a decoder, one expert each, and every one seen as often."""
    records = expert_records(np.arange(4), np.ones(4), 4, encoder_layers=2)
    records.use([0, 1], 1)
    records.use([2, 3], 2)
    records.use([0, 1, 0, 1], 3)  # the encoder's are the latest and the most frequent
    order = {running: eviction_order(records, SCORES[policy], running, np.arange(4)).tolist() for running in range(4)}
    assert order[0][:2] == [0, 1]  # over; still to come
    assert all(set(order[running][:2]) == {0, 1} for running in range(4))


def test_the_encoder_is_loaded_first_in_the_order_of_its_layers() -> None:
    records = expert_records(np.array([0, 0, 1, 2, 2]), np.array([1, 9, 3, 4, 6]), 3, encoder_layers=2)
    assert warm_order(records).tolist() == [1, 0, 2, 4, 3]
    assert warm_order(expert_records(np.array([0, 0, 1]), np.array([1, 9, 3]), 2)).tolist() == [2, 1, 0]


def test_distances_count_the_decoder_alone() -> None:
    records = expert_records(np.array([2, 3, 4]), np.ones(3), 5, encoder_layers=2)
    assert records.layer_distance(2).tolist() == [3, 1, 2]
    assert records.layer_distance(0).tolist() == [1, 2, 3]  # the encoder runs: the decoder's first comes next


def test_nearness_and_passes_count_the_decoder_alone() -> None:
    """Two layers of an encoder, three of a decoder, one expert each."""
    records = expert_records(np.arange(5), np.ones(5), 5, encoder_layers=2)
    for running in range(5):
        expected = 1 - (records.layer_distance(running) - 1) / 3
        assert records.layer_nearness(running)[2:].tolist() == expected[2:].tolist()
    for running in (0, 1):  # the encoder runs: the decoder's first comes next
        assert records.layer_nearness(running)[2:].tolist() == pytest.approx([1, 2 / 3, 1 / 3])
    records.begin_sequence()
    passes = []
    for clock, layer in enumerate((0, 1, 2, 3, 4, 2, 3, 4), 1):
        records.use([layer], clock)
        passes.append(records.sequence_passes)
    assert passes == [1, 1, 1, 1, 1, 2, 2, 2] and records.last_passes().tolist() == [0, 0, 2, 2, 2]


# -- exact ----------------------------------------------------------------------------------------------------------


@pytest.mark.gate("G1")
@pytest.mark.parametrize("prefetch", ["off", "lookahead", "path", "popularity"])
def test_a_small_cache_changes_nothing(bundle: Path, prefetch: str) -> None:
    least = open_bundle(bundle).manifest.cost.minimum_expert_bytes

    def logits(cache: str, prefetch: str, threads: int) -> tuple[np.ndarray, int]:
        with load(bundle, expert_cache=cache, prefetch=prefetch, context=128, threads=threads) as engine:
            engine.cache.finish_warming()
            rows = [engine.logits([START, *SHORT], PROMPT)]
            for position, token in enumerate(PROMPT[20:30], len(SHORT) + 1):
                rows.append(engine.model.logits(engine.step([token], [0], [position])))
            return np.concatenate(rows), engine.cache.stats.evictions

    whole, none = logits("100%", "off", 1)
    part, evictions = logits(f"{least}", prefetch, 2)
    assert none == 0 and evictions > 0 and np.array_equal(part, whole)


# -- sequences and slots -----------------------------------------------------------------------------------------------


def test_a_batch_gives_what_each_prompt_gives_alone(bundle: Path) -> None:
    prompts = [PROMPT, SHORT, PROMPT[:1], PROMPT[3:40]]
    with load(bundle, expert_cache="100%", context=128, slots=2) as engine:
        alone = [[step.token_id for step in engine.generate(prompt, max_new_tokens=9)] for prompt in prompts]
        ends = set(engine.model.spec.eos_token_ids)
        expected = [[token for token in answer if token not in ends] for answer in alone]
        assert generate_many(engine, prompts, [[]] * 4, [9] * 4) == expected
        drafts = [expected[0], expected[1][:3], [5, 6], [*expected[3][:4], 7]]
        assert generate_many(engine, prompts, drafts, [9] * 4) == expected


def test_answers_are_scored_behind_the_start_token(bundle: Path) -> None:
    pairs = [(PROMPT, SHORT), (SHORT, PROMPT[:5]), (PROMPT[:9], [4])]
    with load(bundle, expert_cache="100%", context=128, slots=2) as engine:
        found = dict(forced_logits(engine, pairs))
        for index, (prompt, answer) in enumerate(pairs):
            expected = engine.logits([START, *answer[:-1]], prompt)
            assert np.array_equal(found[index], expected)


def test_prompts_are_checked(bundle: Path) -> None:
    with load(bundle, expert_cache="100%", context=16) as engine:
        assert engine.new_tokens_limit(PROMPT[:16], 99) == 16  # the encoder's context is its own
        with pytest.raises(InputError, match="empty"):
            list(forced_logits(engine, [([], [5])]))
        with pytest.raises(ContextOverflow):
            list(engine.generate(PROMPT[:17]))
        with pytest.raises(ContextOverflow):
            list(forced_logits(engine, [([5], PROMPT[:17])]))
        with pytest.raises(InputError, match="empty"):
            engine.logits([START])
    with load(bundle, expert_cache="100%", context=16, slots=2) as engine:
        engine.begin_texts([1], [SHORT])
        engine.step([START], [1], [0])
        with pytest.raises(ExecutionError, match="no prompt"):
            engine.step([START, START], [1, 0], [1, 0])


def test_a_prompt_longer_than_a_pass_is_one_pass(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bidirectional attention needs all of it; the budget counts on it."""
    from moec.profiles import memory_floor
    from moec.runtime.engine import batch, engine

    exact = emit_bundle(folder, tmp_path / "exact")
    expected = Oracle(folder).logits(PROMPT, [START])
    for module in (batch, memory_floor, engine):
        monkeypatch.setattr(module, "MAX_PASS_TOKENS", 16)
    with load(exact, expert_cache="100%", context=64) as opened:
        assert memory_floor.longest_pass(opened.model.spec, 1, 64) == 64
        assert np.abs(opened.logits([START], PROMPT) - expected).max() <= 1e-3 * np.abs(expected).max()


def test_a_budget_is_kept_by_the_elastic_cache(bundle: Path) -> None:
    """Prompts, copied slots and decoded tokens: what the cache may take follows the longest of them."""
    with load(bundle, memory=str(resident_set_bytes() + (1 << 30)), context=64, slots=2) as engine:
        engine.begin_texts([0], [PROMPT])
        engine.prefill([START])
        engine.copy_slots([0, 0], 1)
        assert engine.kv.prompt_lengths.tolist() == [60, 60]
        one, other = (engine.model.logits(engine.step([7], [slot], [1])) for slot in (0, 1))
        assert np.array_equal(one, other)


def test_slots_take_their_prompts_along() -> None:
    kv, draw = KVCache(WITH_ENCODER, 3, 8), np.random.default_rng(3)
    assert kv.keys[0] is kv.keys[1] and kv.keys[1] is not kv.keys[2] and set(kv.cross_keys) == {2, 3, 4}
    for slot, length in ((0, 3), (1, 7), (2, 5)):
        kv.begin_prompt(slot, length)
    for array in (*kv.cross_keys.values(), *kv.cross_values.values()):
        array[:] = draw.normal(size=array.shape)
    before = {layer: array.copy() for layer, array in kv.cross_keys.items()}
    kv.copy_slots([1, 0, 0], 2)
    assert kv.prompt_lengths.tolist() == [7, 3, 3]
    for layer, array in kv.cross_keys.items():
        for slot, parent in enumerate([1, 0, 0]):
            length = kv.prompt_lengths[slot]
            assert np.array_equal(array[slot, :, :length], before[layer][parent, :, :length])
    kv.cross_keys[2][2] = 0
    kv.copy_slots([0, 2, 1], 2)  # the two have one prompt: nothing is copied
    assert not kv.cross_keys[2][2].any() and kv.cross_keys[2][1].any()


# -- operations --------------------------------------------------------------------------------------------------------


def test_capacity_is_counted_per_sequence_and_expert() -> None:
    chosen = np.array([[0], [1], [0], [0], [1], [0], [0]], np.int32)
    sequences = np.array([4, 4, 4, 4, 4, 9, 9])
    assert within_capacity(chosen, sequences, 2).ravel().tolist() == [True, True, True, False, True, True, True]
    assert within_capacity(chosen, sequences, 1).ravel().tolist() == [True, True, False, False, False, True, False]
    assert within_capacity(np.empty((0, 1), np.int32), np.empty(0), 1).shape == (0, 1)


def test_attention_over_a_prompt_by_its_definition() -> None:
    draw, spec, sizes = np.random.default_rng(2), QuantSpec.parse("bf16"), (2, 16, 32)
    heads, head_size, hidden = sizes
    plain, packed = {}, {}
    for name in ("query", "key", "value", "output"):
        shape = (hidden, heads * head_size) if name == "output" else (heads * head_size, hidden)
        bits = (draw.normal(0, 0.2, shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        plain[name] = (bits.astype(np.uint32) << 16).view(np.float32)
        packed[f"cross_{name}"] = kernels.PackedMatrix(pack_16_bit(plain[name], spec), *shape, spec)
    run = CrossAttention(CROSS, packed)
    keys, values = np.zeros((2, heads, 9, head_size), np.float32), np.zeros((2, heads, 9, head_size), np.float32)
    lengths, states = (5, 9), [draw.normal(size=(length, hidden)).astype(np.float32) for length in (5, 9)]
    slots = np.repeat(np.arange(2, dtype=np.int32), lengths)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    run.store(np.concatenate(states), slots, positions, keys, values)
    x, where = draw.normal(size=(4, hidden)).astype(np.float32), np.array([1, 0, 1, 0], np.int32)
    prompts = kernels.TokenPlaces(where, np.zeros_like(where), np.array(lengths, np.int32)[where])
    found = run(x, prompts, keys, values)
    for row, slot in enumerate(where):
        queries = (plain["query"] @ x[row]).reshape(heads, head_size)
        own_keys = (states[slot] @ plain["key"].T).reshape(-1, heads, head_size)
        own_values = (states[slot] @ plain["value"].T).reshape(-1, heads, head_size)
        mixed = []
        for head in range(heads):
            scores = own_keys[:, head] @ queries[head]
            shares = np.exp(scores - scores.max())
            mixed.append(shares @ own_values[:, head] / shares.sum())
        assert found[row] == pytest.approx(plain["output"] @ np.concatenate(mixed), abs=2e-5)


# -- replays -----------------------------------------------------------------------------------------------------------


ANSWER = np.random.default_rng(6).integers(3, VOCABULARY, 20).tolist()
RATES = DeviceRates(storage_bytes_per_s=10**8, storage_latency_ns=10**5, readers=2, compute_scale=1.0)


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
        for position, token in enumerate(ANSWER):
            engine.model.logits(engine.step([token], [0], [position]))
        trace.end()
        counted = engine.cache.stats.since(before).replayable_counts()
        counts = tuple(layer.experts.count for layer in layers)
        top_k = tuple(layer.experts.top_k for layer in layers)
        header = TraceHeader("0" * 64, counts, top_k, len(PROMPT), prefetch, 1, 1, 1, 1, first, prefetch_rule="likely")  # type: ignore[arg-type]
        return Trace(header, tuple(trace.passes)), counted, engine.cache.capacity_bytes


def replayed_spec(path: Path, capacity: int, pins: int = 0) -> CacheSpec:
    opened = open_bundle(path)
    entries = opened.manifest.experts
    sizes = np.array([page_bytes(entry.size_bytes) for entry in entries], np.int64)
    return CacheSpec(sizes, capacity, bundle_records(opened, opened.tables(), entries), pins)


@pytest.mark.parametrize("policy", SCORES)
def test_a_replay_counts_what_the_engine_counted(bundle: Path, policy: str) -> None:
    trace, counted, capacity = record(bundle, policy, 14)
    spec = replayed_spec(bundle, capacity)
    found = replay(trace.accesses(), spec, policy, warm_order(spec.records).tolist()).replayable_counts()
    assert counted["evictions"] > 0
    for name in ("lookups", "hits", "misses", "evictions", "bytes_read"):
        assert found[name] == counted[name], name


@pytest.mark.parametrize("kind", ["path", "popularity"])
def test_tables_advise_in_both_stacks(bundle: Path, kind: str) -> None:
    """Replayed advice of table predictors equals the recorded advice, layer by layer."""
    trace, _, capacity = record(bundle, "lrfu", 8, prefetch=kind)
    opened = open_bundle(bundle)
    advice = table_advice(kind, opened.tables(), opened.manifest.model, trace)  # type: ignore[arg-type]
    for each in trace.passes:
        for at, recorded in enumerate(each.advice):
            assert tuple(advice(each, each.first_layer + at)) == recorded
    spec = replayed_spec(bundle, capacity, capacity // 2)
    steps = [(timed_pass(traced, trace.header.first_expert, advice),) for traced in trace.passes]
    found = predict_steps(steps, trace.prompt_passes, spec, "lrfu", SimulatedMachine(RATES))
    assert found.cache.prefetch_reads > 0 and found.tokens == len(ANSWER)
