"""Replays and predictions of bench/papers: they follow from the requests and the bytes, and from no clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.papers.edgemoe.arms import streamed
from bench.papers.edgemoe.latency import distribution, prompt_of, sample_ms
from bench.papers.edgemoe.paths import skew_curve
from bench.papers.edgemoe.predictions import conditioned, found_in_top, predictors
from bench.papers.edgemoe.storage import lowered, lowered_count
from bench.papers.replays import FIFO, RANDOM, TEXT_TOKENS, equal_experts, replay_texts, requests_of
from bench.papers.simulated import Arm, Device, reformatted, simulate
from bench.papers.twiddler.popularity import hit_rate
from bench.prefetch.learned_routers import PASS_TOKENS
from moec.cli.simulation.traces import ReplayedBundle
from moec.manifests.quant import QuantSpec
from moec.runtime.bundle.open_bundle import Bundle, open_bundle
from moec.runtime.expert_cache.records import expert_records
from moec.runtime.trace.trace import Access, Trace, TracedPass, TraceHeader

PAGE = 4096
SHIPPED = Path(__file__).parents[2] / "examples" / "bundle"
DEVICE = "jetson-tx2-ssd"
TOKENS = 4


def four_experts() -> ReplayedBundle:
    """Return a bundle of one layer with four experts of one page."""
    layer, popularity = np.zeros(4, np.int32), np.ones(4)
    return ReplayedBundle(np.full(4, PAGE, np.int64), expert_records(layer, popularity, 1), [], PAGE, 4, [1, 2, 3, -1])


def requests(*experts: int) -> list[Access]:
    """Return one request per expert, in layer 0."""
    return [(0, (expert,)) for expert in experts]


def test_first_in_first_out_evicts_an_expert_that_was_just_used() -> None:
    text = requests(0, 1, 0, 2, 0)
    misses = {policy: replay_texts(four_experts(), [text], 2 * PAGE, policy).misses for policy in (FIFO, "lru")}
    assert misses == {FIFO: 4, "lru": 3}


def test_random_eviction_is_the_same_in_each_run() -> None:
    text = requests(*np.random.default_rng(1).integers(0, 4, 50).tolist())
    first, second = (replay_texts(four_experts(), [text], 2 * PAGE, RANDOM) for _ in range(2))
    assert first.misses == second.misses
    assert first.misses > replay_texts(four_experts(), [text], 2 * PAGE, "optimum").misses


def test_texts_share_one_cache() -> None:
    text = requests(0, 1)
    assert replay_texts(four_experts(), [text, text], 2 * PAGE, "lru").misses == 2


def test_routes_are_replayed_as_texts_of_one_pass_each() -> None:
    chosen = np.zeros((2 * PASS_TOKENS, 2, 2), np.uint8)
    chosen[:, 0], chosen[:, 1] = (1, 0), (3, 2)
    replayed, texts = equal_experts(chosen), requests_of(chosen)
    assert [len(text) for text in texts] == [2 * TEXT_TOKENS] * 2
    assert texts[0][:2] == [(0, (0, 1)), (1, (6, 7))]
    assert (replayed.count, replayed.minimum_bytes, sorted(replayed.warm[:4])) == (8, 2 * PAGE, [0, 1, 6, 7])
    assert replay_texts(replayed, texts, 4 * PAGE, "edgemoe").hit_rate == 1
    assert replay_texts(replayed, texts, 2 * PAGE, "lru").hit_rate < 0.01


def traced(bundle: Bundle, elapsed_ns: int) -> Trace:
    """Return a trace of single tokens, each with the first two experts that a layer has."""
    model = bundle.manifest.model
    count = model.num_layers
    pruned = bundle.manifest.pruned_experts
    chosen = tuple(tuple([each for each in range(8) if each not in pruned[layer]][:2]) for layer in range(count))
    zeros = (0,) * count
    each = TracedPass(1, chosen, ((),) * count, (elapsed_ns,) * count, zeros, zeros, 0, elapsed_ns, 0)
    header = TraceHeader("0" * 64, (8,) * count, (2,) * count, 1, "off", 1, 10**9, 10**9, 0)
    return Trace(header, (each,) * TOKENS)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return open_bundle(SHIPPED)


def test_a_token_in_memory_takes_the_bytes_of_its_weights_over_the_memory_rate(bundle: Bundle) -> None:
    held = Arm(bundle.manifest.cost.expert_padded_bytes, prefetch="off")
    found = [simulate(bundle, traced(bundle, ns), Device(DEVICE), held).timeline for ns in (10, 10**9)]
    assert found[0] == found[1], "the times of the recording machine must not count"
    trace, entries = traced(bundle, 10), bundle.manifest.experts
    chosen = [(layer, expert) for layer, experts in enumerate(trace.passes[0].chosen) for expert in experts]
    expert_bytes = sum(entry.size_bytes for entry in entries if (entry.layer, entry.expert) in chosen)
    dense_bytes = sum(
        entry.spec.row_bytes(entry.shape[-1])
        * (1 if len(entry.shape) == 1 or entry.name == "embedding" else entry.shape[0])
        for entry in bundle.manifest.dense
    )
    rate = Device(DEVICE).profile.memory_bytes_per_s
    assert found[0].stall == 0
    assert found[0].tpot_mean_ns == pytest.approx((dense_bytes + expert_bytes) / rate * 1e9, rel=0.01)


def test_slower_storage_takes_longer_only_if_experts_are_read(bundle: Bundle) -> None:
    trace, cost = traced(bundle, 0), bundle.manifest.cost
    for size, factor in ((cost.expert_padded_bytes, 1), (None, 5)):
        arm = Arm(size, policy="lru", prefetch="off", is_warm=size is not None)
        fast, slow = (simulate(bundle, trace, Device(DEVICE, rate), arm).timeline for rate in (500_000_000, 50_000_000))
        assert (slow.tpot_mean_ns or 0) >= factor * (fast.tpot_mean_ns or 0)
        assert (slow.tpot_mean_ns == fast.tpot_mean_ns) == (size is not None)


def test_layer_streaming_reads_all_experts_for_every_token(bundle: Bundle) -> None:
    cost, device = bundle.manifest.cost, Device(DEVICE)
    trace = device.with_own_times(traced(bundle, 0), bundle)
    largest = max(sum(e.size_bytes for e in bundle.manifest.experts if e.layer == layer) for layer in range(6))
    found = streamed(bundle, trace, device, 2 * (largest + 8 * PAGE))
    assert found.decode_bytes_read_per_token == pytest.approx(cost.expert_padded_bytes, rel=0.02)
    only_chosen = simulate(bundle, replace(trace), device, Arm(None, policy="lru", prefetch="off", is_warm=False))
    assert only_chosen.timeline.decode_bytes_read_per_token < cost.expert_padded_bytes / 2


def test_the_curve_of_paths_counts_frequent_paths_first() -> None:
    paths = np.array([[[0], [0]]] * 6 + [[[0], [1]]] * 2 + [[[1], [0]], [[1], [1]]])
    curve = dict(skew_curve(paths))
    assert curve[0.2] == pytest.approx(0.6) and curve[0.5] == pytest.approx(0.8) and curve[1.0] == 1


def test_the_hit_rate_is_the_share_of_the_uses_of_placed_experts() -> None:
    assert hit_rate(np.array([[True, False]]), np.array([[3, 1]])) == pytest.approx(0.75)


def routes_of_pairs(tokens: int, layers: int, seed: int) -> np.ndarray:
    """Return the experts of tokens [T, L, 2]: those of a layer follow from both layers before, the first two do not."""
    source, rows = np.random.default_rng(seed), np.empty((tokens, layers, 2), np.uint8)
    rows[:, :, 1] = 7
    rows[:, :2, 0] = source.integers(0, 3, (tokens, 2))
    for layer in range(2, layers):
        rows[:, layer, 0] = (rows[:, layer - 2, 0] + rows[:, layer - 1, 0]) % 3
    return rows


def test_two_earlier_layers_foretell_what_one_does_not(bundle: Bundle) -> None:
    model = bundle.manifest.model
    counted, held_out = (routes_of_pairs(600, model.num_layers, seed) for seed in (1, 2))
    shares = {name: found_in_top(held_out, each, model) for name, each in predictors(counted, model).items()}
    assert shares["2 earlier layers"][1] == 1
    for name in ("no earlier layer", "1 earlier layer"):
        assert 0.5 < shares[name][1] < 0.8 and shares[name][3] == 1 == shares[name][-1]
        assert shares[name] == sorted(shares[name])


def test_the_condition_is_the_pair_that_says_most() -> None:
    train, test = routes_of_pairs(3000, 3, 1), routes_of_pairs(300, 3, 2)
    is_twice = (train[:, 0, 0] == 0) & (train[:, 1, 0] == 1)
    train[~is_twice, 2, 1] = np.random.default_rng(3).integers(3, 7, (~is_twice).sum())
    train[~is_twice, 2, 0] = np.random.default_rng(4).integers(0, 3, (~is_twice).sum())
    use = conditioned(train, test)
    assert use.condition == "expert 0 (layer 0) and 1 (layer 1)"
    assert use.after[1] == 1 and use.of_all[1] < 0.5 and sum(use.of_all) == pytest.approx(2)


def test_a_sample_takes_the_time_of_its_prompt_and_of_each_further_token(bundle: Bundle) -> None:
    held = Arm(bundle.manifest.cost.expert_padded_bytes, prefetch="off")
    found = simulate(bundle, traced(bundle, 0), Device(DEVICE), held).timeline
    assert found.tpot_mean_ns and sample_ms(found) == pytest.approx(TOKENS * found.tpot_mean_ns / 1e6, rel=0.01)


def test_a_distribution_rises_to_one() -> None:
    assert distribution([3.0, 1.0, 2.0, 4.0]) == [(1.0, 0.25), (2.0, 0.5), (3.0, 0.75), (4.0, 1.0)]


def test_the_prompt_of_an_item_ends_before_its_answer() -> None:
    assert prompt_of("Question: 1 + 1?\nAnswer: 2") == "Question: 1 + 1?\nAnswer:"
    with pytest.raises(ValueError, match="expected one of"):
        prompt_of("no item")


def test_the_bytes_of_a_plan_tell_how_many_experts_were_lowered() -> None:
    assert lowered_count(3 * 8 + 2 * 5, 5, 8, 5) == 2
    for wrong in (3 * 8 + 2 * 5 + 1, 5 * 8 + 3, 5 * 5 - 3):
        with pytest.raises(ValueError, match="expected a plan"):
            lowered_count(wrong, 5, 8, 5)
    assert lowered(np.array([[0.3, 0.1], [0.2, 0.4]]), 2).tolist() == [False, True, True, False]


def test_other_formats_change_the_bytes_that_a_simulation_reads(bundle: Bundle) -> None:
    count, spec = len(bundle.manifest.experts), QuantSpec.parse("q1g128b")
    told = reformatted(bundle, [spec] * count)
    assert told.manifest.cost.expert_packed_bytes == 3 * spec.packed_bytes(256, 256) * count
    least = Arm(None, policy="lru", prefetch="off", is_warm=False)
    found = simulate(told, traced(bundle, 0), Device(DEVICE), least).timeline
    pages = -(-3 * spec.packed_bytes(256, 256) // PAGE) * PAGE
    assert found.decode_bytes_read_per_token == 2 * bundle.manifest.model.num_layers * pages
