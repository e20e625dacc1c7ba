"""The experts of a token in one call a layer: bits and decisions of Model's steps, its specification."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.manifests.errors import ExecutionError
from moec.manifests.model import ModelSpec
from moec.runtime import Engine, kernels, load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.bundle.tables import PathTables, Tables
from moec.runtime.expert_cache.cache_stats import CacheStats
from moec.runtime.expert_cache.native_cache import NativeCache
from moec.runtime.options.runtime import RuntimeOptions
from moec.runtime.prefetch.predictors import PathPredictor, PopularityPredictor
from moec.runtime.trace.trace import TraceRecorder
from tests.gates.bundles import emit_bundle
from tests.pruned_mixtral import LEFT_OUT, PRUNED, save_whole
from tests.runtime.learned_bundle import with_maps
from tests.runtime.one_call import EXPERTS, LAYERS, TOP_K, bundle, calls, in_one_call, steps_only
from tests.runtime.paths import random_paths
from tests.tiny_families import TINY_FAMILIES, save_tiny_family

TOKENS = 120
FAMILIES_THAT_DO_MORE = (
    "deepseek-v2", "deepseek-v2-tied-half", "granite-scaled", "qwen3-plain-first", "gpt-oss", "gpt-oss-top1-half",
)  # fmt: skip
DECISIONS = ("lookups", "hits", "misses", "evictions", "reads", "rereads", "bytes_read")

__all__ = ["bundle", "calls"]  # fixtures

pytestmark = pytest.mark.skipif(kernels.compiled() is None, reason="no extension")


Way = Callable[[Engine], None]


class Run:
    """Logits and decisions of an engine for forced tokens, with a prompt between them."""

    def __init__(self, engine: Engine, way: Way, *, reads_ahead: bool) -> None:
        way(engine)
        cache, model = engine.cache, engine.model
        assert isinstance(cache, NativeCache)
        if not reads_ahead:  # what is in memory then depends on what was asked for alone, not on what has arrived
            assert cache.reads.resize(cache.capacity_bytes, 0)
        model.trace = TraceRecorder(model.times, lambda: cache.stats)
        drawn = np.random.default_rng(11).integers(4, 200, TOKENS).tolist()
        rows, learned = [], []
        for position, token in enumerate(drawn):
            if position == 60:  # guesses are forgotten there: about the first layer it has learned nothing since
                engine.begin_sequence()
                learned.append(self.threshold(engine, LAYERS - 1, 0))
                rows.append(engine.prefill(drawn[:7]))
            rows.append(engine.decode([token], [0], [position % 60 + 7 * (position >= 60)]))
            if position == 60:
                learned.append(self.threshold(engine, LAYERS - 1, 0))
        self.learned_over_prompt = learned
        model.trace.end()
        self.rows = [np.array(row) for row in rows]
        self.stats: CacheStats = cache.stats
        self.decisions = [getattr(self.stats, name) for name in DECISIONS]
        self.passes = [(each.chosen, each.advice, each.scores) for each in model.trace.passes]
        self.quality = (dict(model.prefetch_quality.demanded), dict(model.prefetch_quality.predicted))
        self.thresholds = [self.threshold(engine, *pair) for pair in ((0, 1, 1), (0, 2, 2), (1, 2, 1), (2, 0, 1))]
        self.times = model.times
        assert not cache.leased().size
        cache.check_invariants()

    @staticmethod
    def threshold(engine: Engine, running: int, layer: int, rank: int = 1) -> float:
        model = engine.model
        thresholds = model.advisor.thresholds if model.pass_experts is None else model.pass_experts
        return thresholds.threshold(running, layer, rank)


def opened(path: Path, change: Callable[[ModelSpec], ModelSpec] = lambda model: model, **options: Any) -> Engine:
    """An engine of a bundle whose model is another."""
    found = open_bundle(path)
    other = replace(found, manifest=replace(found.manifest, model=change(found.manifest.model)))
    return Engine(other, RuntimeOptions(**{"context": 80, "cache_state": "cold", "expert_cache": "50%"} | options))


def weighed(model: ModelSpec) -> ModelSpec:
    """Other weights of what experts give, and of the sum."""

    def router(renormalize: bool, scale: float) -> Callable[[Any], Any]:
        def change(layer: Any) -> Any:
            spec = replace(layer.experts.router, renormalize=renormalize, scale=scale)
            return replace(layer, experts=replace(layer.experts, router=spec))

        return change

    changes = (router(False, 2.5), router(True, 1.0), router(False, 1.0))
    layers = tuple(change(layer) for change, layer in zip(changes, model.layers, strict=True))
    return replace(model, layers=layers, residual_scale=0.5)


@pytest.mark.parametrize("change", [lambda model: model, weighed], ids=["plain", "scaled"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"expert_cache": "40%"},
        {"prefetch": "off"},
        {"prefetch_layers": 1},
        {"prefetch_layers": 3},
        {"policy": "lru"},
        {"policy": "edgemoe", "prefetch": "popularity"},
        {"policy": "hobbit", "prefetch": "path", "prefetch_layers": 1},
        {"policy": "hobbit-printed", "prefetch": "path", "io": "mmap"},
        {"prefetch_rule": "spread", "prefetch_layers": 3},
        {"prefetch_rule": "first-miss", "prefetch_layers": 3},
        {"prefetch_rule": "first-miss", "prefetch": "path"},
        {"prefetch_experts": 5},
        {"prefetch_rule": "until-routed"},
        {"prefetch_rule": "until-routed", "prefetch": "popularity"},
    ],
    ids=str,
)
def test_one_call_decides_and_computes_as_the_steps_do(
    bundle: Path, change: Callable[[ModelSpec], ModelSpec], options: dict[str, Any], calls: list[int]
) -> None:
    runs = []
    for way in (in_one_call, steps_only):
        with opened(bundle, change, **options) as engine:
            runs.append(Run(engine, way, reads_ahead=False))
    one, steps = runs
    assert calls == list(range(LAYERS)) * TOKENS
    assert all(np.array_equal(own, other) for own, other in zip(one.rows, steps.rows, strict=True))
    assert one.decisions == steps.decisions and one.stats.misses > TOKENS
    assert one.passes == steps.passes and one.quality == steps.quality
    assert one.thresholds == pytest.approx(steps.thresholds, rel=1e-12)
    if options.get("prefetch") != "off":
        assert any(advice for _, layers, _ in one.passes for advice in layers) and sum(one.quality[1].values()) > 0
        learns = options.get("prefetch_rule", "likely") == "likely" and "prefetch_experts" not in options
        assert (one.thresholds != [0.4, 0.8, 0.4, 0.4]) == learns
    for run in runs:
        before, after = run.learned_over_prompt
        assert before == after
    assert one.times.dense_ns > 0 and one.times.experts_ns > 0 and one.times.shared_ns == 0


@pytest.mark.parametrize(
    "keys, transitions, has_paths",
    [(LAYERS * EXPERTS * EXPERTS, 0.0, True), (60, 0.5, True), (0, 1.0, True), (0, 0.0, False)],
)
def test_paths_predict_as_in_python(bundle: Path, keys: int, transitions: float, has_paths: bool) -> None:
    """The dictionary decides, or single experts, or popularity if neither was seen."""
    runs, tables = [], random_paths(keys, keys, transitions)
    for way in (in_one_call, steps_only):
        with opened(bundle, prefetch="path") as engine:
            engine.model.advisor.predictor = PathPredictor(tables, engine.model.spec)
            engine.model.bind_one_call()
            runs.append(Run(engine, way, reads_ahead=False))
    one, steps = runs
    assert one.passes == steps.passes and one.decisions == steps.decisions
    assert one.thresholds == pytest.approx(steps.thresholds, rel=1e-12)
    popularity = [tables.popularity[at].astype(np.float32).tobytes() for at in range(1, LAYERS)]
    predicted = [scores.ahead[at][0] for _, _, scores in one.passes if scores for at in range(LAYERS - 1)]
    assert all(scores in popularity for scores in predicted) != has_paths


def test_learned_routers_predict_as_in_python(bundle: Path, tmp_path: Path) -> None:
    runs, learned = [], with_maps(bundle, tmp_path / "learned")
    for way in (in_one_call, steps_only):
        with opened(learned) as engine:
            runs.append(Run(engine, way, reads_ahead=False))
    with opened(learned, learned_routers=False) as engine:
        plain = Run(engine, in_one_call, reads_ahead=False)
    one, steps = runs
    assert one.passes == steps.passes and one.decisions == steps.decisions
    assert one.thresholds == pytest.approx(steps.thresholds, rel=1e-12)
    assert all(np.array_equal(own, other) for own, other in zip(one.rows, plain.rows, strict=True))
    assert one.passes != plain.passes


def random_sets(seed: int, share: float, transitions: float) -> Tables:
    """Return tables with some exact sets that were seen, some of them too rarely to count, and some single experts.

    share: share of all sets of the last layer.
    transitions: share of the single experts.
    """
    drawn, every = np.random.default_rng(seed), list(combinations(range(EXPERTS), TOP_K))
    rows = np.array([(LAYERS - 1, *a, *b) for a, b in product(every, every)], np.uint16)
    rows = rows[drawn.random(len(rows)) < share]
    lengths = drawn.integers(1, 5, len(rows))
    seen = drawn.random((LAYERS - 1, EXPERTS, 1)) < transitions
    firsts = drawn.integers(0, EXPERTS, len(rows))
    steps = np.concatenate([np.arange(length) for length in lengths] or [np.empty(0, np.int64)])
    paths = PathTables(
        transitions=(drawn.integers(0, 9, (LAYERS - 1, EXPERTS, EXPERTS)) * seen).astype(np.uint32),
        keys=rows,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        experts=((np.repeat(firsts, lengths) + 5 * steps) % EXPERTS).astype(np.uint16),
        counts=drawn.integers(1, 9, len(steps)).astype(np.uint32),
    )
    return Tables(drawn.integers(1, 99, (LAYERS, EXPERTS)).astype(np.uint32), paths)


@pytest.mark.parametrize("share, transitions", [(1.0, 0.0), (0.5, 0.5), (0.0, 1.0)])
def test_sets_predict_in_one_call_as_in_python(bundle: Path, share: float, transitions: float) -> None:
    runs, known = [], random_sets(3, share, transitions)
    for way in (in_one_call, steps_only):
        with opened(bundle, prefetch="path") as engine:
            engine.model.advisor.predictor = PathPredictor(known, engine.model.spec)
            engine.model.bind_one_call()
            runs.append(Run(engine, way, reads_ahead=False))
    one, steps = runs
    assert one.passes == steps.passes and one.decisions == steps.decisions
    assert one.thresholds == pytest.approx(steps.thresholds, rel=1e-12)
    if share:  # the last layer's scores come from sets of both layers
        predicted = [scores.ahead[1][0] for _, _, scores in one.passes if scores]
        assert len({bytes(each) for each in predicted}) > 9


def never_left_out(passes: list[Any]) -> bool:
    """Return whether no pass chose an expert that is left out."""
    return not any(
        expert in LEFT_OUT[at] for chosen, _, _ in passes for at, rows in enumerate(chosen) for expert in np.ravel(rows)
    )


@pytest.mark.parametrize("options", [{}, {"expert_cache": "40%"}, {"prefetch": "off"}], ids=str)
def test_experts_that_are_left_out(options: dict[str, Any], tmp_path: Path, calls: list[int]) -> None:
    path = emit_bundle(save_whole(tmp_path / "model"), tmp_path / "bundle", pruned=PRUNED)
    runs = []
    for way in (in_one_call, steps_only):
        with opened(path, **options) as engine:
            runs.append(Run(engine, way, reads_ahead=False))
    one, steps = runs
    assert len(calls) == LAYERS * TOKENS
    assert all(np.array_equal(own, other) for own, other in zip(one.rows, steps.rows, strict=True))
    assert one.decisions == steps.decisions and one.passes == steps.passes and one.quality == steps.quality
    assert never_left_out(one.passes)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_routers_of_nan_never_choose_what_is_left_out(value: float, tmp_path: Path, calls: list[int]) -> None:
    """The logits that a bias makes NaN or infinite are compared; neither way computes an expert that has no bytes."""
    path = emit_bundle(save_whole(tmp_path / "model"), tmp_path / "bundle", pruned=PRUNED)
    chosen = []
    for way in (in_one_call, steps_only):
        with opened(path, expert_cache="100%") as engine:
            model, cache = engine.model, engine.cache
            for router in model.routers():
                assert router is not None
                router.bias = np.full(8, value, np.float32)
            model.bind_one_call()
            way(engine)
            model.trace = TraceRecorder(model.times, partial(getattr, cache, "stats"))
            for position in range(4):
                with np.errstate(invalid="ignore"), suppress(ExecutionError):
                    engine.decode([5 + position], [0], [position])
            model.trace.end()
            chosen.append([each.chosen for each in model.trace.passes])
    assert chosen[0] == chosen[1] and len(calls) == 4 * LAYERS
    assert all(
        expert not in LEFT_OUT[at]
        for layers in chosen[0]
        for at, rows in enumerate(layers)
        for expert in np.ravel(rows)
    )


@pytest.mark.parametrize("family", FAMILIES_THAT_DO_MORE)
def test_families_that_do_more(family: str, tmp_path: Path, calls: list[int]) -> None:
    """Layers without routed experts, shared experts, scaled sums, biases of routers and experts."""
    path = emit_bundle(save_tiny_family(tmp_path / "model", TINY_FAMILIES[family]), tmp_path / "bundle")
    runs = []
    for way in (in_one_call, steps_only):
        with opened(path, expert_cache="70%") as engine:
            runs.append(Run(engine, way, reads_ahead=False))
            has_shared = bool(engine.model.shared_experts)
    one, steps = runs
    assert len(calls) == LAYERS * TOKENS
    assert all(np.array_equal(own, other) for own, other in zip(one.rows, steps.rows, strict=True))
    assert one.decisions == steps.decisions and one.passes == steps.passes and one.quality == steps.quality
    assert (one.times.shared_ns > 0) == (steps.times.shared_ns > 0) == has_shared


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("expert_cache", ["30%", "60%", "100%"])
def test_what_is_read_ahead_changes_no_result(bundle: Path, expert_cache: str, threads: int) -> None:
    rows = []
    for way in (in_one_call, steps_only):
        with opened(bundle, expert_cache=expert_cache, cache_state="warm", threads=threads) as engine:
            run = Run(engine, way, reads_ahead=True)
            assert run.stats.prefetch_used <= run.stats.prefetch_reads <= run.stats.reads
            rows.append(run.rows)
    assert all(np.array_equal(own, other) for own, other in zip(*rows, strict=True))


def test_experts_are_read_ahead(bundle: Path) -> None:
    with opened(bundle) as engine:
        assert Run(engine, in_one_call, reads_ahead=True).stats.prefetch_used > 0


def test_who_takes_one_call(bundle: Path, tmp_path: Path) -> None:
    """If the extension does not support a model, the steps are used."""
    plain = {"expert_cache": "50%", "context": 64}
    for options in ({}, {"prefetch": "off"}, {"expert_cache": "100%"}, {"policy": "edgemoe"}, {"io": "mmap"}):
        with load(bundle, **(plain | options)) as engine:
            assert engine.model.pass_experts is not None

    def with_sigmoid(model: ModelSpec) -> ModelSpec:
        first = model.layers[0]
        router = replace(first.experts.router, scoring="sigmoid")
        return replace(model, layers=(replace(first, experts=replace(first.experts, router=router)), *model.layers[1:]))

    with opened(bundle, with_sigmoid) as engine:
        assert engine.model.pass_experts is None
    tiny = TINY_FAMILIES["qwen2"]  # the weight of its shared expert depends on the token
    with opened(emit_bundle(save_tiny_family(tmp_path / "model", tiny), tmp_path / "bundle")) as engine:
        assert engine.model.shared_experts and engine.model.pass_experts is None


def test_another_predictor_is_asked(bundle: Path) -> None:
    """An engine whose predictor was changed goes step by step, and asks that one."""
    with load(bundle, expert_cache="50%", context=64) as engine:
        asked = []

        class Counting(PopularityPredictor):
            def scores(self, state: Any, ahead: int = 1) -> np.ndarray | None:
                asked.append(state.layer)
                return super().scores(state, ahead)

        engine.model.advisor.predictor = Counting(engine.bundle.tables(), engine.model.spec)
        engine.decode([5], [0], [0])
        assert set(asked) == {0, 1, 2}


def test_a_cache_or_a_rule_that_was_replaced_is_the_one_that_serves(bundle: Path, calls: list[int]) -> None:
    with load(bundle, expert_cache="50%", context=64) as engine:
        model, advisor = engine.model, engine.model.advisor
        for name, value in (("rule", "spread"), ("layers", 1), ("experts", 2)):
            before = getattr(advisor, name)
            setattr(advisor, name, value)
            engine.decode([5], [0], [0])
            setattr(advisor, name, before)
        assert not calls
        engine.decode([5], [0], [0])
        assert calls == list(range(LAYERS))
        asked, cache = list[int](), model.cache

        class Counting:
            def stream(self, layer: int, *arguments: Any, **options: Any) -> Any:
                asked.append(layer)
                return cache.stream(layer, *arguments, **options)

            def prefetch(self, indices: Any) -> None:
                cache.prefetch(indices)

        model.cache = Counting()  # type: ignore[assignment]
        engine.decode([5], [0], [0])
        assert asked == list(range(LAYERS)) == calls
