"""Passes of several tokens in one call a layer: bits and decisions of Model's steps, its specification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.runtime import Engine, kernels, load
from moec.runtime.expert_cache.native_cache import NativeCache
from moec.runtime.prefetch.advisor import Advisor
from moec.runtime.prefetch.pass_state import PassState
from moec.runtime.prefetch.predictors import PathPredictor
from tests.gates.bundles import emit_bundle
from tests.pruned_mixtral import PRUNED, save_whole
from tests.runtime.learned_bundle import with_maps
from tests.runtime.one_call import LAYERS, bundle, in_one_call, steps_only
from tests.runtime.paths import random_paths
from tests.tiny_families import TINY_FAMILIES, save_tiny_family

SLOTS = 5
FAMILIES = ("deepseek-v2", "granite-scaled", "qwen3-plain-first", "gpt-oss", "gpt-oss-top1-half")
DECISIONS = ("lookups", "hits", "misses", "evictions", "reads", "rereads", "bytes_read")

__all__ = ["bundle"]  # a fixture

pytestmark = pytest.mark.skipif(kernels.compiled() is None, reason="no extension")


def passes() -> list[tuple[list[int], list[int], list[int]]]:
    """Tokens, slots and positions of passes: prompts, one token of each sequence, both together, one token alone."""
    drawn = np.random.default_rng(5)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in drawn.integers(4, 60, count)]

    found = [(tokens(9), [0] * 9, list(range(9))), (tokens(18), [1] * 7 + [2] * 11, [*range(7), *range(11)])]
    for step in range(6):
        found.append((tokens(3), [0, 1, 2], [9 + step, 7 + step, 11 + step]))
    found.append((tokens(3 + 14), [2, 0, 1] + [3] * 14, [17, 15, 13, *range(14)]))
    for step in range(6):
        found.append((tokens(4), [3, 0, 2, 1], [14 + step, 16 + step, 18 + step, 14 + step]))
    found += [(tokens(1), [3], [20]), (tokens(2), [3, 3], [21, 22]), (tokens(110), [4] * 110, list(range(110)))]
    return found


class Run:
    """Logits, decisions and advice of an engine for `passes`."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, in_one: bool, reads_ahead: bool) -> None:
        (in_one_call if in_one else steps_only)(engine)
        cache, model = engine.cache, engine.model
        assert isinstance(cache, NativeCache)
        if not reads_ahead:  # what is in memory then depends on what was asked for alone, not on what has arrived
            assert cache.reads.resize(cache.capacity_bytes, 0)
        self.advice, self.calls = list[list[int]](), 0
        one_call, advise = kernels.experts_layer, Advisor.advise

        def counted(native: Any, layer: int, hidden: np.ndarray, sequences: int) -> Any:
            found = one_call(native, layer, hidden, sequences)
            self.calls += 1
            self.advice.append(list(native.advice))
            return found

        def noted(advisor: Advisor, state: PassState) -> Any:
            found = advise(advisor, state)
            self.advice.append(list(found[1]))
            return found

        with monkeypatch.context() as patched:
            patched.setattr(kernels, "experts_layer", counted)
            patched.setattr(Advisor, "advise", noted)
            engine.begin_sequence()
            self.rows = [engine.model.logits(engine.step(*each)) for each in passes()]
        self.decisions = [getattr(cache.stats, name) for name in DECISIONS]
        self.quality = (dict(model.prefetch_quality.demanded), dict(model.prefetch_quality.predicted))
        self.times = model.times
        assert not cache.leased().size
        cache.check_invariants()


def both(
    path: Path, monkeypatch: pytest.MonkeyPatch, reads_ahead: bool = False, tables: Any = None, **options: Any
) -> tuple[Run, Run]:
    """Run a bundle in one call and in steps, and compare their bits."""
    runs = []
    for in_one in (True, False):
        asked = {"context": 128, "slots": SLOTS, "cache_state": "cold", "expert_cache": "60%"} | options
        with load(path, **asked) as engine:
            if tables is not None:
                engine.model.advisor.predictor = PathPredictor(tables, engine.model.spec)
                engine.model.bind_one_call()
            runs.append(Run(engine, monkeypatch, in_one=in_one, reads_ahead=reads_ahead))
    one, steps = runs
    assert one.calls == LAYERS * len(passes()) and not steps.calls
    assert all(np.array_equal(own, other) for own, other in zip(one.rows, steps.rows, strict=True))
    return one, steps


OPTIONS: list[dict[str, Any]] = [
    {},
    {"prefetch": "off"},
    {"prefetch_layers": 3},
    {"policy": "lru"},
    {"policy": "edgemoe", "prefetch": "popularity"},
    {"policy": "hobbit", "prefetch": "path", "io": "mmap"},
    {"prefetch_rule": "spread", "prefetch_layers": 3},
    {"prefetch_rule": "first-miss", "prefetch_layers": 3},
    {"prefetch_experts": 2},
    {"prefetch_rule": "until-routed"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_call_decides_and_computes_as_the_steps_do(
    bundle: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, steps = both(bundle, monkeypatch, **options)
    assert one.decisions == steps.decisions and one.quality == steps.quality
    assert one.advice == steps.advice and any(one.advice) == (options.get("prefetch") != "off")
    assert one.times.dense_ns > 0 and one.times.experts_ns > 0


@pytest.mark.parametrize("keys, transitions", [(400, 0.0), (60, 0.5), (0, 1.0), (0, 0.0)])
def test_paths_of_several_tokens_are_added(
    bundle: Path, keys: int, transitions: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, steps = both(bundle, monkeypatch, prefetch="path", tables=random_paths(keys, keys, transitions))
    assert one.advice == steps.advice and one.quality == steps.quality and any(one.advice)


def test_learned_routers_predict_for_several_tokens(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, steps = both(with_maps(bundle, tmp_path / "learned"), monkeypatch)
    assert one.advice == steps.advice and any(one.advice)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_do_more(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers without routed experts, shared experts, scaled sums, biases of routers and experts."""
    path = emit_bundle(save_tiny_family(tmp_path / "model", TINY_FAMILIES[family]), tmp_path / "bundle")
    one, steps = both(path, monkeypatch, expert_cache="80%")
    assert one.decisions == steps.decisions and one.quality == steps.quality and one.advice == steps.advice
    assert (one.times.shared_ns > 0) == (steps.times.shared_ns > 0)


def test_experts_that_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = emit_bundle(save_whole(tmp_path / "model"), tmp_path / "bundle", pruned=PRUNED)
    one, steps = both(path, monkeypatch)
    assert one.decisions == steps.decisions and one.advice == steps.advice


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("expert_cache", ["28%", "60%", "100%"])
def test_cache_size_and_threads_change_no_bit(
    bundle: Path, expert_cache: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest cache holds fewer experts than one layer of a pass needs."""
    whole, _ = both(bundle, monkeypatch, expert_cache="100%")
    one, _ = both(bundle, monkeypatch, reads_ahead=True, expert_cache=expert_cache, threads=threads, cache_state="warm")
    assert all(np.array_equal(own, other) for own, other in zip(one.rows, whole.rows, strict=True))
    assert expert_cache == "100%" or one.decisions[DECISIONS.index("evictions")] > 0


def test_rows_are_those_of_each_sequence_alone(bundle: Path) -> None:
    with load(bundle, context=64, slots=4, expert_cache="50%") as engine:
        prompts = [[5 + slot, 9, 17 + slot] for slot in range(4)]
        alone = []
        for prompt in prompts:
            engine.begin_sequence()
            engine.prefill(prompt)
            alone.append([engine.decode([20 + step], [0], [3 + step])[0] for step in range(8)])
        engine.begin_sequence()
        for slot, prompt in enumerate(prompts):
            engine.step(prompt, [slot] * 3, range(3))
        for step in range(8):
            together = engine.decode([20 + step] * 4, range(4), [3 + step] * 4)
            assert all(np.array_equal(row, own[step]) for row, own in zip(together, alone, strict=True))
