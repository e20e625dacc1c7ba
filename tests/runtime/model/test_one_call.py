"""Experts of a layer in one call: bits and decisions of Model's steps, its specification."""

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
from moec.manifests.model import ModelSpec, StaticRouting
from moec.runtime import Engine, kernels, load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.bundle.tables import PathTables, Tables
from moec.runtime.expert_cache.native_cache import NativeCache
from moec.runtime.options.runtime import RuntimeOptions
from moec.runtime.prefetch.predictors import PathPredictor, PopularityPredictor
from moec.runtime.trace.trace import TraceRecorder
from tests.gates.bundles import emit_bundle
from tests.pruned_mixtral import LEFT_OUT, PRUNED, save_whole
from tests.runtime.learned_bundle import with_maps
from tests.runtime.watched_layers import watched_layers
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.tiny_models import TinyMixtral, save_tiny_mixtral
from tests.tiny_switch import TINY_SWITCHES, save_tiny_switch

LAYERS, EXPERTS, TOP_K = 3, 12, 3
TOKENS = 120
FAMILIES_THAT_DO_MORE = (
    "deepseek-v2", "deepseek-v2-tied-half", "granite-scaled", "qwen3-plain-first", "gpt-oss", "gpt-oss-top1-half",
    "deepseek-v2-groups-yarn", "deepseek-v3", "deepseek-v3-halves", "ernie", "qwen2", "phimoe", "phimoe-tied-half",
    "minimax-m2", "hy3-tied-half", "flint-listed", "glm4-lite-groups-yarn", "solar-bias-groups",
    "afmoe-listed", "kolibri-listed", "laguna", "lfm2-no-bias", "lfm2-half", "qwen3-next-listed",
    "gemma4-own-values", "gemma4-half",
)  # fmt: skip
DECISIONS = ("lookups", "hits", "misses", "evictions", "reads", "rereads", "bytes_read")

pytestmark = pytest.mark.skipif(kernels.compiled() is None, reason="no extension")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("token")
    shape = TinyMixtral(layers=LAYERS, experts=EXPERTS, top_k=TOP_K, seed=7)
    return emit_bundle(save_tiny_mixtral(root / "model", shape), root / "bundle", mixed=True)


def steps_only(engine: Engine) -> None:
    """Leave this engine the steps that are called one by one."""
    engine.model.pass_experts = None


def in_one_call(engine: Engine) -> None:
    """Leave it as it is."""
    assert engine.model.pass_experts is not None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that went in one call."""
    layers, one_call = list[int](), kernels.experts_layer

    def counted(native: Any, layer: int, *rest: Any) -> Any:
        layers.append(layer)
        return one_call(native, layer, *rest)

    monkeypatch.setattr(kernels, "experts_layer", counted)
    return layers


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
    """Logits, decisions and advice of an engine for forced tokens, with a prompt between them, and for `passes`."""

    def __init__(self, engine: Engine, way: Callable[[Engine], None], reads_ahead: bool) -> None:
        way(engine)
        cache, model = engine.cache, engine.model
        assert isinstance(cache, NativeCache)
        if not reads_ahead:  # what is in memory then depends on what was asked for alone, not on what has arrived
            assert cache.reads.resize(cache.capacity_bytes, 0)
        self.engine = engine
        with watched_layers() as watched:
            model.trace = TraceRecorder(model.times, lambda: cache.stats)
            self.rows = self.one_by_one()
            model.trace.end()
            self.passes = [(each.chosen, each.advice, each.scores) for each in model.trace.passes]
            model.trace = None
            engine.begin_sequence()
            self.rows += [model.logits(engine.step(*each)) for each in passes()]
        self.calls, self.advice = watched.calls, watched.advice
        self.stats, self.times = cache.stats, model.times
        self.decisions = [getattr(self.stats, name) for name in DECISIONS]
        self.quality = (dict(model.prefetch_quality.demanded), dict(model.prefetch_quality.predicted))
        self.thresholds = [self.threshold(*pair) for pair in ((0, 1), (0, 2), (1, 2), (2, 0))]
        assert not cache.leased().size
        cache.check_invariants()

    def one_by_one(self) -> list[np.ndarray]:
        engine, rows, learned = self.engine, list[np.ndarray](), list[float]()
        drawn = np.random.default_rng(11).integers(4, 200, TOKENS).tolist()
        for position, token in enumerate(drawn):
            if position == 60:  # guesses are forgotten there: about the first layer it has learned nothing since
                engine.begin_sequence()
                learned.append(self.threshold(LAYERS - 1, 0))
                rows.append(np.array(engine.prefill(drawn[:7])))
            rows.append(np.array(engine.decode([token], [0], [position % 60 + 7 * (position >= 60)])))
            if position == 60:
                learned.append(self.threshold(LAYERS - 1, 0))
        assert learned[0] == learned[1]
        return rows

    def threshold(self, running: int, layer: int) -> float:
        model = self.engine.model
        thresholds = model.advisor.thresholds if model.pass_experts is None else model.pass_experts
        return thresholds.threshold(running, layer)


def opened(path: Path, change: Callable[[ModelSpec], ModelSpec] = lambda model: model, **options: Any) -> Engine:
    """An engine of a bundle whose model is another."""
    found = open_bundle(path)
    other = replace(found, manifest=replace(found.manifest, model=change(found.manifest.model)))
    small = {"context": 128, "slots": 5, "cache_state": "cold", "expert_cache": "50%"}
    return Engine(other, RuntimeOptions(**small | options))  # type: ignore[arg-type]


def both(
    path: Path,
    change: Callable[[ModelSpec], ModelSpec] = lambda model: model,
    tables: Tables | None = None,
    reads_ahead: bool = False,
    **options: Any,
) -> tuple[Run, Run]:
    """Run a bundle in one call and in steps. Bits must agree, and decisions if nothing is read ahead."""
    runs = []
    for way in (in_one_call, steps_only):
        with opened(path, change, **options) as engine:
            if tables is not None:
                engine.model.advisor.predictor = PathPredictor(tables, engine.model.spec)
                engine.model.bind_one_call()
            runs.append(Run(engine, way, reads_ahead))
    one, steps = runs
    assert one.calls == LAYERS * (TOKENS + len(passes())) and not steps.calls
    assert equal(one, steps)
    if not reads_ahead:
        assert one.decisions == steps.decisions and one.quality == steps.quality
        assert one.passes == steps.passes and one.advice == steps.advice
        assert one.thresholds == pytest.approx(steps.thresholds, rel=1e-12)
    return one, steps


def equal(one: Run, other: Run) -> bool:
    return all(np.array_equal(*rows) for rows in zip(one.rows, other.rows, strict=True))


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
    bundle: Path, change: Callable[[ModelSpec], ModelSpec], options: dict[str, Any]
) -> None:
    one, _ = both(bundle, change, **options)
    assert one.stats.misses > TOKENS
    assert any(one.advice) == (options.get("prefetch") != "off") == (sum(one.quality[1].values()) > 0)
    if options.get("prefetch") != "off":
        learns = options.get("prefetch_rule", "likely") == "likely" and "prefetch_experts" not in options
        assert any(one.thresholds) == learns
    assert one.times.dense_ns > 0 and one.times.experts_ns > 0 and one.times.shared_ns == 0


def random_paths(share: float, transitions: float, has_sets: bool) -> Tables:
    """Return tables with some pairs or exact sets of experts, and some single ones, that were seen.

    share: of all pairs, or of all sets of the last layer, some of them too rarely to count.
    transitions: share of the single experts.
    """
    drawn = np.random.default_rng(3)
    if has_sets:
        sets = list(combinations(range(EXPERTS), TOP_K))
        keys = np.array([(LAYERS - 1, *a, *b) for a, b in product(sets, sets)], np.uint16)
    else:
        keys = np.arange(LAYERS * EXPERTS * EXPERTS, dtype=np.int64)
    keys = keys[drawn.random(len(keys)) < share]
    lengths = drawn.integers(1, 5, len(keys))
    seen = drawn.random((LAYERS - 1, EXPERTS, 1)) < transitions
    firsts = drawn.integers(0, EXPERTS, len(keys))
    steps = np.concatenate([np.arange(length) for length in lengths] or [np.empty(0, np.int64)])
    paths = PathTables(
        transitions=(drawn.integers(0, 9, (LAYERS - 1, EXPERTS, EXPERTS)) * seen).astype(np.uint32),
        keys=keys,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        experts=((np.repeat(firsts, lengths) + 5 * steps) % EXPERTS).astype(np.uint16),
        counts=drawn.integers(1, 9, len(steps)).astype(np.uint32),
    )
    return Tables(drawn.integers(1, 99, (LAYERS, EXPERTS)).astype(np.uint32), paths)


@pytest.mark.parametrize("has_sets", [False, True])
@pytest.mark.parametrize("share, transitions", [(1.0, 0.0), (0.2, 0.5), (0.0, 1.0), (0.0, 0.0)])
def test_paths_predict_as_in_python(bundle: Path, share: float, transitions: float, has_sets: bool) -> None:
    """The dictionary decides, or single experts, or popularity if neither was seen."""
    tables = random_paths(share, transitions, has_sets)
    one, _ = both(bundle, tables=tables, prefetch="path")
    assert any(one.advice)
    popularity = [tables.popularity[at].astype(np.float32).tobytes() for at in range(1, LAYERS)]
    ahead = [scores.ahead for _, _, scores in one.passes if scores]
    predicted = [scores[at][0] for scores in ahead for at in range(LAYERS - 1)]
    assert all(scores in popularity for scores in predicted) == (share == transitions == 0)
    assert share == 0 or len({scores[1][0] for scores in ahead}) > 9, "the last layer's come from both layers before"


def by_sigmoid(model: ModelSpec) -> ModelSpec:
    routers = [replace(layer.experts.router, scoring="sigmoid") for layer in model.layers]
    layers = zip(model.layers, routers, strict=True)
    return replace(
        model, layers=tuple(replace(at, experts=replace(at.experts, router=router)) for at, router in layers)
    )


@pytest.mark.parametrize("change", [lambda model: model, by_sigmoid], ids=["softmax", "sigmoid"])
def test_learned_routers_predict_as_in_python(
    bundle: Path, tmp_path: Path, change: Callable[[ModelSpec], ModelSpec]
) -> None:
    learned = with_maps(bundle, tmp_path / "learned")
    one, _ = both(learned, change)
    with opened(learned, change, learned_routers=False) as engine:
        plain = Run(engine, in_one_call, reads_ahead=False)
    assert equal(one, plain) and one.passes != plain.passes and one.advice != plain.advice


def never_left_out(chosen: list[Any]) -> bool:
    """Return whether no pass chose an expert that is left out."""
    return not any(e in LEFT_OUT[at] for layers in chosen for at, rows in enumerate(layers) for e in np.ravel(rows))


@pytest.mark.parametrize("change", [lambda model: model, by_sigmoid], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("options", [{}, {"expert_cache": "40%"}, {"prefetch": "off"}], ids=str)
def test_experts_that_are_left_out(
    options: dict[str, Any], change: Callable[[ModelSpec], ModelSpec], tmp_path: Path
) -> None:
    path = emit_bundle(save_whole(tmp_path / "model"), tmp_path / "bundle", pruned=PRUNED)
    one, _ = both(path, change, **options)
    assert never_left_out([chosen for chosen, _, _ in one.passes])


@pytest.mark.parametrize("change", [lambda model: model, by_sigmoid], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_routers_of_nan_never_choose_what_is_left_out(
    value: float, change: Callable[[ModelSpec], ModelSpec], tmp_path: Path, calls: list[int]
) -> None:
    """The logits that a bias makes NaN or infinite are compared; neither way computes an expert that has no bytes."""
    path = emit_bundle(save_whole(tmp_path / "model"), tmp_path / "bundle", pruned=PRUNED)
    chosen = []
    for way in (in_one_call, steps_only):
        with opened(path, change, expert_cache="100%") as engine:
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
    assert never_left_out(chosen[0])


@pytest.mark.parametrize("family", FAMILIES_THAT_DO_MORE)
def test_families_that_do_more(family: str, tmp_path: Path) -> None:
    """Layers without routed experts, shared experts, scaled sums, biases of routers and experts."""
    path = emit_bundle(save_tiny_family(tmp_path / "model", TINY_FAMILIES[family]), tmp_path / "bundle")
    one, steps = both(path, expert_cache="80%")
    has_shared = bool(one.engine.model.shared_experts)
    assert (one.times.shared_ns > 0) == (steps.times.shared_ns > 0) == has_shared


@pytest.fixture(scope="module")
def whole(bundle: Path) -> Run:
    """A run with all experts in memory."""
    with opened(bundle, expert_cache="100%") as engine:
        return Run(engine, in_one_call, reads_ahead=False)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("expert_cache", ["28%", "60%", "100%"])
def test_cache_size_threads_and_what_is_read_ahead_change_no_bit(
    bundle: Path, whole: Run, expert_cache: str, threads: int
) -> None:
    """The smallest cache holds fewer experts than one layer of a pass needs."""
    options = {"expert_cache": expert_cache, "threads": threads, "cache_state": "warm"}
    for run in both(bundle, reads_ahead=True, **options):
        assert equal(run, whole)
        assert run.stats.prefetch_used <= run.stats.prefetch_reads <= run.stats.reads
        assert (run.stats.evictions > 0) == (expert_cache != "100%")


def test_experts_are_read_ahead(bundle: Path) -> None:
    with opened(bundle) as engine:
        assert Run(engine, in_one_call, reads_ahead=True).stats.prefetch_used > 0


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


def test_who_takes_steps(bundle: Path) -> None:
    """If the extension does not support a model, the steps are used."""

    def with_static(model: ModelSpec) -> ModelSpec:
        first = model.layers[0]
        static = StaticRouting(tuple(range(TOP_K)) * model.vocab_size)
        router = replace(first.experts.router, static=static)
        return replace(model, layers=(replace(first, experts=replace(first.experts, router=router)), *model.layers[1:]))

    with opened(bundle, with_static) as engine:
        assert engine.model.pass_experts is None
        assert engine.code_path.why_not_one_call == "static routing"


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


class EncodedRun:
    """Logits, decisions and advice of a model with an encoder: prompts of several slots, then their tokens."""

    def __init__(self, engine: Engine) -> None:
        cache, model = engine.cache, engine.model
        assert isinstance(cache, NativeCache) and cache.reads.resize(cache.capacity_bytes, 0)
        with watched_layers() as watched:
            self.rows = self.run(engine)
        self.calls, self.advice = watched.calls, watched.advice
        self.decisions = [getattr(cache.stats, name) for name in DECISIONS]
        self.quality = (dict(model.prefetch_quality.demanded), dict(model.prefetch_quality.predicted))
        assert not cache.leased().size
        cache.check_invariants()

    @staticmethod
    def run(engine: Engine) -> list[np.ndarray]:
        random, rows = np.random.default_rng(8), list[np.ndarray]()
        for lengths in ([19], [1], [13, 24, 7]):
            engine.begin_sequence()
            prompts = [random.integers(4, 60, length).tolist() for length in lengths]
            slots = list(range(len(lengths)))
            starts = engine.begin_texts(slots, prompts)
            rows.append(engine.decode([start[0] for start in starts], slots, [0] * len(slots)))
            for position in range(1, 12):
                tokens = random.integers(4, 60, len(slots)).tolist()
                rows.append(engine.decode(tokens, slots, [position] * len(slots)))
        return rows


@pytest.mark.parametrize("name", sorted(TINY_SWITCHES))
@pytest.mark.parametrize(
    "options",
    [{}, {"prefetch": "path", "policy": "edgemoe"}, {"prefetch": "popularity", "policy": "hobbit"}],
    ids=str,
)
def test_a_model_with_an_encoder(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Its experts have a capacity. Layers of the encoder are evicted first, and predict nothing in the decoder."""
    path, runs = emit_bundle(save_tiny_switch(tmp_path / "model", TINY_SWITCHES[name]), tmp_path / "bundle"), []
    for way in (in_one_call, steps_only):
        with load(path, context=48, slots=3, expert_cache="60%", cache_state="cold", **options) as engine:
            way(engine)
            runs.append(EncodedRun(engine))
    one, steps = runs
    assert one.calls and not steps.calls and any(one.advice)
    assert all(np.array_equal(*rows) for rows in zip(one.rows, steps.rows, strict=True))
    assert one.decisions == steps.decisions and one.quality == steps.quality and one.advice == steps.advice
