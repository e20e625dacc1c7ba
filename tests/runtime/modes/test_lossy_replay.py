"""A trace decided again under lossy modes: by the code of a run, and so to the same decisions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.cli.measuring.decode_speed import measure_decode, new_tracer
from moec.cli.simulation.little_model import with_little_model
from moec.cli.simulation.lossy_replay import LossyReplay
from moec.cli.simulation.predictions import Simulation
from moec.cli.simulation.traces import recorded_trace, replayed_bundle
from moec.profiles.loading import load_profile
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.engine.engine import Engine
from moec.runtime.expert_cache.policies import lru_score
from moec.runtime.options.lossy import parse_modes, setting_text
from moec.runtime.options.runtime import RuntimeOptions
from moec.runtime.simulation.lossy_replay import missing_scores
from moec.runtime.simulation.recorded_advice import recorded_advice
from moec.runtime.simulation.timeline import DeviceRates
from moec.runtime.trace.trace import Trace

TOKENS = np.random.default_rng(3).integers(4, 260, 44).tolist()
PROMPT_TOKENS = 20
RATES = DeviceRates(10**6, 1000, 1, 1.0)
CACHE = "50%"


def run(path: Path, **options: Any) -> tuple[Trace, dict[str, Any] | None, dict[str, int]]:
    """The trace of a run under some modes, what they decided, and what the cache did."""
    chosen = RuntimeOptions(expert_cache=CACHE, context=64, readers=1, **options)
    with Engine(open_bundle(path), chosen) as engine:
        engine.cache.finish_warming()
        tracer = new_tracer(engine)
        measure_decode(engine, TOKENS, PROMPT_TOKENS, tracer=tracer)
        trace = recorded_trace(engine, tracer, PROMPT_TOKENS, load_profile("laptop"))
        counts = engine.mode_counts
        return trace, None if counts is None else counts.to_plain(), engine.cache.stats.replayable_counts()


def simulated(path: Path, trace: Trace, options: dict[str, str]) -> dict[str, Any]:
    bundle = open_bundle(path)
    replayed = replayed_bundle(bundle)
    simulation = Simulation(bundle, trace, replayed, RATES, trace.header.prefetch, recorded_advice)
    capacity = replayed.capacity_bytes(0.5)
    assert capacity is not None
    (row,) = simulation.rows([capacity], {"lrfu": "lrfu"}, [options])
    return row.to_plain()


@pytest.mark.parametrize("prefetch", ["off", "path", "popularity", "lookahead"])
@pytest.mark.parametrize("rule", ["likely", "spread", "first-miss"])
@pytest.mark.parametrize(
    "modes",
    [
        {"dynamic_precision": "0.2,0.7"},
        {"cache_routing": "margin=0.4,drop=0.1"},
        {"dynamic_precision": "0.2,0.7", "cache_routing": "margin=0.4,drop=0.1"},
    ],
)
def test_decisions_are_those_of_the_run_that_was_recorded(
    two_version_bundle: Path, modes: dict[str, str], prefetch: str, rule: str
) -> None:
    """The trace is of the lossy run itself, so that its routers said the very same: every decision and byte agrees."""
    if prefetch == "off" and rule != "likely":
        pytest.skip("there is nothing to look for")
    trace, counts, cache = run(two_version_bundle, prefetch=prefetch, prefetch_rule=rule, lossy=setting_text(modes))
    found = simulated(two_version_bundle, trace, modes)
    assert counts is not None and found["decisions"] == counts
    assert counts["low"] + counts["replaced"] + counts["dropped"] + counts["skipped"] > 0
    assert found["lookups"] == cache["lookups"]
    if prefetch == "off":
        assert {name: found[name] for name in cache} == cache


def test_the_little_models_word_is_that_of_a_run(two_version_bundle: Path) -> None:
    """Falling back each time, so that the text is the whole model's: also what was foretold, and what it was worth."""
    _, counts, _ = run(two_version_bundle, lossy="big-little gamma=0.99")
    assert counts is not None and counts["fallback_share"] == 1
    exact = with_little(two_version_bundle, run(two_version_bundle)[0])
    found = simulated(two_version_bundle, exact, {"big_little": "gamma=0.99"})
    told = found["decisions"]
    assert told == counts
    assert 0 < told["foretold_right"] < told["foretold"] == 24 * 3 * 4 - 3 * 4
    # And a share of them, by what was noted of each token.
    sure = sorted(each.scores.confidence for each in exact.passes[1:] if each.scores is not None)  # type: ignore[type-var]
    some = simulated(two_version_bundle, exact, {"big_little": f"gamma={sure[10]:.9f}"})["decisions"]
    assert some["fallback_tokens"] in (10, 11)


@pytest.mark.parametrize("count", [1, 3])
def test_a_little_model_of_another_size(two_version_bundle: Path, count: int) -> None:
    mode = {"big_little": f"gamma=0.99,k={count}"}
    _, counts, _ = run(two_version_bundle, lossy=setting_text(mode))
    told = with_little(two_version_bundle, run(two_version_bundle)[0], str(count))
    assert told.header.little_experts == count
    assert simulated(two_version_bundle, told, mode)["decisions"] == counts
    asked = missing_scores(told, parse_modes(None, "gamma=0.99", None))
    assert asked == f"a little model of this size: the recorded one has {count} experts"


def with_little(path: Path, trace: Trace, little_k: str = "K/2") -> Trace:
    options = RuntimeOptions(expert_cache=CACHE, context=64)
    return with_little_model(trace, path, options, None, TOKENS, PROMPT_TOKENS, little_k)


def test_the_trace_says_of_a_token_what_the_model_said(two_version_bundle: Path) -> None:
    exact = with_little(two_version_bundle, run(two_version_bundle)[0])
    whole = exact.passes[1].scores
    assert whole is not None and len(whole.logits) == 4 * 3 * 8 == len(whole.little_logits)
    first = np.frombuffer(whole.logits, "<f4")[:8]
    assert np.argsort(-first, kind="stable")[:4].tolist() == list(exact.passes[1].chosen[0])
    assert whole.logits[:32] == whole.little_logits[:32], "the first layer routes before any expert was left out"
    assert whole.logits[32:] != whole.little_logits[32:]
    assert [len(each) for each in whole.ahead] == [2, 1, 1], "two layers, then one, then the next token's first"


def test_nothing_given_up_is_the_exact_run(two_version_bundle: Path) -> None:
    """With thresholds that never bite the passes are those that were recorded, to the nanosecond."""
    trace, _, _ = run(two_version_bundle, prefetch="lookahead")
    exact = simulated(two_version_bundle, trace, {})
    same = simulated(two_version_bundle, trace, {"dynamic_precision": "1,1"})
    names = ("bytes_read", "misses", "tpot_mean_ns", "ttft_ns", "prefetch_reads", "stall")
    assert {name: same[name] for name in names} == {name: exact[name] for name in names}


def test_lookahead_walks_by_what_the_simulated_cache_holds(two_version_bundle: Path) -> None:
    """Layer 0 sees layer 2 where it finds nothing missing in layer 1: more often in a larger cache."""
    trace, _, _ = run(two_version_bundle)
    trace = replace(trace, header=replace(trace.header, prefetch_rule="first-miss"))
    bundle = open_bundle(two_version_bundle)
    replayed = replayed_bundle(bundle)
    lossy = LossyReplay(bundle, replayed, "lookahead")
    far = []
    for share in (0.5, 0.9):
        capacity = replayed.capacity_bytes(share)
        assert capacity is not None
        steps = lossy.decide(trace, capacity, lru_score, {}, recorded_advice).steps
        far.append(sum(len(step[0].advice[0]) == 3 for step in steps[1:]))
    assert 0 < far[0] < far[1] <= len(trace.passes) - 1


def test_what_a_trace_lacks_is_named(two_version_bundle: Path) -> None:
    trace, _, _ = run(two_version_bundle)
    assert missing_scores(trace, parse_modes("0.5,0.9", None, "drop=0.1")) is None
    assert "confidence of the little model" not in str(missing_scores(trace, parse_modes("0.5,0.9", None, None)))
    assert "confidence of the little model" in str(missing_scores(trace, parse_modes(None, "gamma=0.5", None)))
    bare = replace(trace, passes=tuple(replace(each, scores=None) for each in trace.passes))
    assert missing_scores(bare, parse_modes("0.5,0.9", None, None)) == "the scores of routers"
    told = with_little(two_version_bundle, trace)
    assert missing_scores(told, parse_modes(None, "gamma=0.5,k=2", None)) is None, "half of four"
    assert "a little model of this size" in str(missing_scores(told, parse_modes(None, "gamma=0.5,k=3", None)))
