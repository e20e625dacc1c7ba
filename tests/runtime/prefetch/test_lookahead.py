"""HOBBIT's layer-level prediction: stacked routers, the stop at the first miss, pins, and the precision asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.model import ExpertsSpec, RouterSpec
from moec.manifests.quant import QuantSpec
from moec.runtime import kernels, load
from moec.runtime.expert_cache.cache_spec import CacheSpec
from moec.runtime.expert_cache.policies import SCORES
from moec.runtime.expert_cache.records import expert_records
from moec.runtime.expert_cache.simulated_cache import SimulatedCache
from moec.runtime.layers.norms import Norm
from moec.runtime.layers.routing import Router, stack_routers
from moec.runtime.modes.expert_choice import PassChoice, Versions
from moec.runtime.modes.logical_cache import LogicalCache
from moec.runtime.modes.mode_counts import ModeCounts
from moec.runtime.options.lossy import parse_modes
from moec.runtime.prefetch.advisor import Advisor
from moec.runtime.prefetch.pass_state import PassState
from moec.runtime.prefetch.predictors import LookaheadPredictor, Predictor
from tests.kernels.packer import random_matrix
from tests.manifests.examples import layer_spec, model_spec
from tests.runtime.cache_kinds import kernels_of

LAYERS, EXPERTS, TOP_K = 4, 6, 4
FIRST = [EXPERTS * layer for layer in range(LAYERS + 1)]
SPEC = model_spec((layer_spec(experts=EXPERTS, top_k=TOP_K),) * LAYERS)
ONE = np.zeros((1, 1), np.float32)


# -- one product -----------------------------------------------------------------------------------------------------


def router(generator: np.random.Generator, experts: int, spec: str, **changes: Any) -> tuple[Router, Norm]:
    """changes: bias, scoring, pruned, norm_bias, eps."""
    packed = random_matrix(experts, 64, QuantSpec.parse(spec), int(generator.integers(9)))
    matrix = kernels.PackedMatrix(packed.data, experts, 64, QuantSpec.parse(spec))
    bias = generator.standard_normal(experts).astype(np.float32) if changes.get("bias") else None
    experts_spec = ExpertsSpec(experts, 2, 32, "silu", RouterSpec(changes.get("scoring", "softmax"), True))
    weight = 1 + generator.standard_normal(64).astype(np.float32) / 4
    norm_bias = weight if changes.get("norm_bias") else None
    norm = Norm(weight, norm_bias, changes.get("eps", 1e-5))
    return Router(experts_spec, matrix, bias, changes.get("pruned", ())), norm


@given(
    formats=st.lists(st.sampled_from(["bf16", "q8g32", "q4g64"]), min_size=1, max_size=4),
    experts=st.sampled_from([2, 5, 16, 33]),
    biased=st.integers(0, 15),
    name=st.sampled_from(kernels.available()),
    seed=st.integers(0, 1000),
)
def test_stacked_routers_say_what_each_says_alone(
    formats: list[str], experts: int, biased: int, name: str, seed: int
) -> None:
    """biased: of which, a bit each, the router has a bias."""
    generator = np.random.default_rng(seed)
    pairs = [router(generator, experts, text, bias=biased >> at & 1) for at, text in enumerate(formats)]
    hidden = generator.standard_normal((1, 64)).astype(np.float32)
    with kernels_of(name):
        stack = stack_routers([each for each, _ in pairs], [norm for _, norm in pairs])
        assert stack is not None
        found = stack.shares(hidden)
        alone = np.array([each.rule.demand(each.logits(norm(hidden))) for each, norm in pairs])
    assert found == pytest.approx(alone, rel=1e-5)


def test_a_stacked_router_gives_no_share_to_what_is_left_out() -> None:
    generator = np.random.default_rng(1)
    pairs = [router(generator, 8, "bf16"), router(generator, 8, "bf16", pruned=(1, 4))]
    hidden = generator.standard_normal((1, 64)).astype(np.float32)
    stack = stack_routers([each for each, _ in pairs], [norm for _, norm in pairs])
    assert stack is not None
    found = stack.shares(hidden)
    alone = np.array([each.rule.demand(each.logits(norm(hidden))) for each, norm in pairs])
    assert found == pytest.approx(alone, rel=1e-5) and not found[1, [1, 4]].any()


@pytest.mark.parametrize("changes", [{"scoring": "sigmoid"}, {"norm_bias": True}, {"eps": 1e-6}])
def test_routers_of_another_kind_are_not_stacked(changes: dict[str, Any]) -> None:
    generator = np.random.default_rng(1)
    plain, other = router(generator, 8, "bf16"), router(generator, 8, "bf16", **changes)
    assert stack_routers([plain[0]], [plain[1]]) is not None
    assert stack_routers([plain[0], other[0]], [plain[1], other[1]]) is None
    wider = router(generator, 9, "bf16")
    assert stack_routers([plain[0], wider[0]], [plain[1], wider[1]]) is None
    empty = Router(ExpertsSpec(8, 2, 32, "silu", RouterSpec("softmax", True)), None, None)
    assert stack_routers([plain[0], empty], [plain[1], plain[1]]) is None and stack_routers([], []) is None


def test_all_layers_ahead_are_asked_in_one_product(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[int] = []
    product = kernels.router_shares

    def counted(matrices: Any, *others: Any) -> None:
        products.append(len(matrices))
        product(matrices, *others)

    with load(tiny_bundle, expert_cache="50%", context=8, prefetch_rule="first-miss", prefetch_layers=3) as engine:
        predictor = engine.model.advisor.predictor
        assert isinstance(predictor, LookaheadPredictor)
        hidden = np.random.default_rng(4).standard_normal((1, engine.model.spec.hidden_size)).astype(np.float32)
        state = PassState(0, hidden, [])
        monkeypatch.setattr("moec.runtime.layers.routing.kernels.router_shares", counted)
        together = predictor.scores_ahead(state, [1, 2])
        assert products == [2]
        for ahead, found in zip((1, 2), together, strict=True):
            alone = predictor.scores(state, ahead)
            assert found is not None and alone is not None and found.tobytes() == alone.tobytes()
        many = predictor.scores(PassState(0, np.repeat(hidden, 2, axis=0), []))
        assert many is not None and many == pytest.approx(2 * predictor.scores(state), rel=1e-5)  # type: ignore[operator]
        assert "prefetch lookahead to the first miss" in engine.mode


# -- the walk --------------------------------------------------------------------------------------------------------


class Foreseen(Predictor):
    """Says that experts 0, 1, 2, ... of every layer are likely, in this order."""

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray:
        return np.arange(EXPERTS, 0, -1, dtype=np.float64)


def walking(layers: int, held: set[int], experts: int = 0) -> Advisor:
    return Advisor(SPEC, FIRST, Foreseen(), layers, experts, "first-miss", held.__contains__)


def test_the_walk_stops_at_the_first_layer_that_lacks_an_expert() -> None:
    # Of four experts a token: three eighths one layer ahead, a quarter two layers ahead, then one.
    one, two, three = [6, 7], [12], [18]
    assert walking(3, set()).advise(PassState(0, ONE, []))[1] == one
    assert walking(3, {6}).advise(PassState(0, ONE, []))[1] == one
    assert walking(3, {6, 7}).advise(PassState(0, ONE, []))[1] == one + two
    assert walking(3, {6, 7, 13}).advise(PassState(0, ONE, []))[1] == one + two
    assert walking(3, {6, 7, 12}).advise(PassState(0, ONE, []))[1] == one + two + three
    assert walking(2, {6, 7, 12}).advise(PassState(0, ONE, []))[1] == one + two, "no further than it may"
    assert walking(3, {6, 7, 12}, experts=3).advise(PassState(0, ONE, []))[1] == [6, 7, 8]


def test_many_tokens_and_the_end_of_a_pass_look_one_layer_ahead() -> None:
    held = set(range(4 * EXPERTS))
    following, advice = walking(3, held).advise(PassState(0, np.zeros((2, 1), np.float32), []))
    assert following is not None and len(advice) == 4 and set(advice) <= set(range(6, 12))
    assert walking(3, held).advise(PassState(2, ONE, []))[1] == [18, 19]
    assert walking(3, held).advise(PassState(3, ONE, []))[1] == [0, 1], "the next token's first"


# -- pins ------------------------------------------------------------------------------------------------------------


def cache_of(capacity: int, pins: int) -> SimulatedCache:
    """Experts of one byte, six a layer, least recently used first."""
    records = expert_records(np.repeat(np.arange(LAYERS), EXPERTS), np.zeros(LAYERS * EXPERTS), LAYERS)
    spec = CacheSpec(np.ones(LAYERS * EXPERTS, np.int64), capacity, records, pins)
    return SimulatedCache(spec, SCORES["lru"], np.empty(0, np.int64))


def run(cache: SimulatedCache, layer: int, experts: list[int], advice: list[int] | None = None) -> None:
    """One layer, reads taking no time."""
    hits, misses = cache.request(layer, experts)
    cache.queue_and_lease(misses)
    if advice:
        cache.advise(advice)
    while run := cache.next_read():
        for index in run:
            cache.arrive(index)
    assert cache.ready(misses) == misses
    cache.unlease([*hits, *misses])


def held(cache: SimulatedCache) -> set[int]:
    return {index for index in range(LAYERS * EXPERTS) if cache.is_resident(index)}


def test_a_prediction_stays_pinned_until_its_layer_asks() -> None:
    """Layer 0 sees as far as layer 2; layer 1 sees only layer 1's miss, and layer 2's experts stay nevertheless."""
    cache = cache_of(6, 4)
    run(cache, 0, [0, 1], [12, 13])
    run(cache, 1, [6, 7], [18])
    run(cache, 1, [8, 9])  # room comes from whatever is not pinned, though it was used later
    assert held(cache) == {7, 8, 9, 12, 13, 18}
    run(cache, 2, [12])  # 13 was guessed wrong: its layer has come, so it is as any other
    run(cache, 3, [18, 19, 20])
    assert 13 not in held(cache) and 12 in held(cache)


def test_a_new_prediction_of_a_layer_replaces_the_old_one() -> None:
    cache = cache_of(4, 2)
    run(cache, 0, [0], [12, 13])
    run(cache, 1, [6], [12, 14])
    assert {12, 14} <= held(cache)
    run(cache, 1, [7, 8])
    assert held(cache) == {7, 8, 12, 14}, "13 was no longer pinned, and went"


def test_pins_yield_to_demand_the_furthest_and_least_likely_first() -> None:
    cache = cache_of(4, 3)
    run(cache, 0, [0], [18])
    run(cache, 1, [6], [12, 13])
    assert held(cache) == {6, 12, 13, 18}, "18 was predicted before, and stays"
    run(cache, 1, [7, 8])
    assert held(cache) == {7, 8, 12, 13}, "then it goes first"
    run(cache, 1, [9, 10, 11])
    assert held(cache) == {9, 10, 11, 12}, "and of what was predicted last the less likely"
    run(cache, 1, [6, 7, 8, 9])
    assert held(cache) == {6, 7, 8, 9}, "demand takes the last pin"


def test_pins_hold_no_more_than_their_limit() -> None:
    cache = cache_of(6, 3)
    run(cache, 0, [0], [18, 19])
    run(cache, 0, [0], [6, 7])
    assert held(cache) == {0, 6, 7, 18, 19}
    run(cache, 2, [12, 13, 14])
    assert held(cache) == {6, 7, 18, 12, 13, 14}, "19 was one pin too many"


# -- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held_versions", "expected"),
    [
        # Scores 6, 5, 4, 3 of 18: unimportance 0, .33, .61, .83. High, high, low, skipped.
        ([], [6, 7, 24 + 8]),
        ([6 + 2], [6, 7, 8]),  # the high version is there: it is what would be computed
        ([24 + 9], [6, 7, 24 + 8, 24 + 9]),  # a low version that is there costs nothing
    ],
)
def test_experts_are_prefetched_in_the_precision_that_their_scores_ask_for(
    held_versions: list[int], expected: list[int]
) -> None:
    low = np.arange(24, 48)
    sizes = np.ones(48, np.int64)
    records = expert_records(np.tile(np.repeat(np.arange(4), 6), 2), np.zeros(48), 4)
    cache = LogicalCache(CacheSpec(sizes, 48, records, 40), SCORES["lru"], held_versions)
    choice = PassChoice(parse_modes("0.5,0.8", None, None), Versions(FIRST, low), cache, ModeCounts())
    advisor = Advisor(SPEC, FIRST, Foreseen(), 1, 4)
    assert advisor.advise(PassState(0, ONE, [], choice=choice))[1] == expected


# -- a whole run -----------------------------------------------------------------------------------------------------


def test_a_lossy_run_that_walks_repeats(tiny_bundle: Path) -> None:
    """The walk reads the logical cache then, so arrival has no part in it."""
    runs = []
    for readers in (1, 4):
        options: dict[str, Any] = {"prefetch_rule": "first-miss", "prefetch_layers": 3, "readers": readers}
        options |= {"lossy": "dynamic-precision 0.3,0.3"}  # the bundle has no low versions: skipping alone
        with load(tiny_bundle, expert_cache="50%", context=64, **options) as engine:
            engine.cache.finish_warming()
            engine.begin_sequence()
            engine.prefill([5, 6, 7])
            rows = [engine.decode([4 + 7 * at % 200], [0], [at]) for at in range(3, 40)]
            assert engine.lossy is not None and engine.model.advisor.holds == engine.lossy.cache.is_resident  # type: ignore[union-attr]
            runs.append((np.concatenate(rows).tobytes(), engine.mode_counts))
    assert runs[0] == runs[1]
