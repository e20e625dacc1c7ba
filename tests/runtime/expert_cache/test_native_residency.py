"""The extension decides as residency.py and eviction.py do: the same calls, the same states, queues, order, counts."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moec.runtime import kernels
from moec.runtime.expert_cache.cache_spec import CacheSpec
from moec.runtime.expert_cache.cache_stats import CacheStats
from moec.runtime.expert_cache.eviction import eviction_order
from moec.runtime.expert_cache.policies import SCORES, MultidimensionalScore, PolicyScore
from moec.runtime.expert_cache.records import ExpertRecords, expert_records
from moec.runtime.expert_cache.residency import Residency
from moec.runtime.options.runtime import POLICIES, WEIGHTED_POLICIES, EvictionWeights, Policy
from moec.runtime.storage.read_runs import MAX_RUN_BYTES, NONE, ReadRuns

LAYERS, EXPERTS = 3, 5
COUNT = LAYERS * EXPERTS
LAYER = np.arange(COUNT) // EXPERTS
NAMES = ("state", "is_leased", "is_ahead", "is_seen", "prefetches")

pytestmark = pytest.mark.skipif(kernels.compiled() is None, reason="no extension")


WEIGHTS = EvictionWeights(lru=0.2, lfu=0.3, lhu=0.1, fld=0.4)
# The last two of each layer are low versions of the first two.
HIGH = np.arange(COUNT) // EXPERTS * EXPERTS + np.tile([0, 1, 2, 0, 1], LAYERS)


def fresh_records(has_low: bool = False, encoder_layers: int = 0) -> ExpertRecords:
    popularity = np.arange(COUNT, dtype=np.float64) % EXPERTS
    return expert_records(LAYER, popularity, LAYERS, encoder_layers, expert=HIGH if has_low else None)


def score_of(policy: Policy) -> PolicyScore:
    """Return the score of a policy, with WEIGHTS where it takes weights."""
    if policy not in WEIGHTED_POLICIES:
        return SCORES[policy]
    return MultidimensionalScore(WEIGHTS, as_printed=policy == "hobbit-printed")


def native(
    sizes: list[int],
    capacity: int,
    pins: int,
    policy: Policy,
    next_in_file: list[int],
    readers: int,
    has_low: bool = False,
    most_queued: int = 0,
    max_run_bytes: int = MAX_RUN_BYTES,
    encoder: int = 0,
    **changed: Any,
) -> tuple[Any, dict[str, np.ndarray], ExpertRecords]:
    """The extension's cache without storage, the arrays that it writes, and the records."""
    records = fresh_records(has_low, encoder)
    arrays: dict[str, np.ndarray] = {name: np.zeros(COUNT, np.uint8) for name in NAMES[:4]}
    arrays |= {"prefetches": np.zeros((2, COUNT), np.int64), "counts": np.zeros(len(CacheStats.__slots__), np.int64)}
    shared = {"heat": records.heat, "last_used": records.last_used, "uses": records.uses}
    extension = kernels.compiled()
    assert extension is not None
    high = HIGH if has_low else np.arange(COUNT)
    goes_by = {
        "policy": policy,
        "weights": astuple(WEIGHTS),
        "frequency": records.frequency.tolist(),
        "high": high.tolist(),
        "num_layers": LAYERS,
        "encoder_layers": encoder,
    }
    limits = (readers, max_run_bytes, records.half_life, extension.Eviction(**goes_by | changed), capacity, pins)
    sources = [(-1, 0, size, None, -1, 0, 0) for size in sizes]
    reads = extension.ExpertCache(
        arrays | shared, sizes, LAYER.tolist(), next_in_file, *limits, sources, False, most_queued=most_queued
    )
    return reads, arrays, records


class BothMachine(RuleBasedStateMachine):
    """Layers ask, wait, compute and give up; advice comes and goes; reads begin, end and fail; both do the same."""

    @initialize(
        sizes=st.lists(st.sampled_from((0, 10, 10, 20, 30)), min_size=COUNT, max_size=COUNT),
        capacity=st.integers(30, 250),
        pins=st.integers(0, 250),
        policy=st.sampled_from(POLICIES),
        has_low=st.booleans(),
        breaks=st.sets(st.integers(0, COUNT - 1)),
        readers=st.integers(1, 3),
        most_queued=st.integers(0, 2),
        max_run_bytes=st.sampled_from((MAX_RUN_BYTES, 20)),
        encoder_layers=st.integers(0, LAYERS - 1),
    )
    def begin(
        self,
        sizes: list[int],
        capacity: int,
        pins: int,
        policy: Policy,
        breaks: set[int],
        readers: int,
        has_low: bool,
        most_queued: int,
        max_run_bytes: int,
        encoder_layers: int,
    ) -> None:
        following = [NONE if at in breaks or at + 1 == COUNT else at + 1 for at in range(COUNT)]
        own, array = fresh_records(has_low, encoder_layers), np.array(sizes, np.int64)
        order, runs = partial(eviction_order, own, score_of(policy)), ReadRuns(sizes, following, readers, max_run_bytes)
        spec = CacheSpec(array, capacity, own, pins)
        self.spec, self.spec_records = Residency(spec, order, runs=runs, most_queued=most_queued), own
        self.reads, self.arrays, self.records = native(
            sizes, capacity, pins, policy, following, readers, has_low, most_queued, max_run_bytes, encoder_layers
        )
        self.waiting: list[int] = []
        self.loading: list[int] = []

    layers = st.integers(0, LAYERS - 1)
    chosen = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS, unique=True)

    @rule(layer=layers, experts=chosen)
    def request(self, layer: int, experts: list[int]) -> None:
        self.unlease()
        indices = [layer * EXPERTS + expert for expert in experts]
        found = self.spec.request(layer, indices)
        assert self.reads.request(layer, indices) == found
        self.waiting = found[1]
        self.queue_and_lease()

    @rule()
    def begin_sequence(self) -> None:
        self.spec_records.begin_sequence()
        self.reads.begin_sequence()

    @rule()
    def queue_and_lease(self) -> None:
        self.spec.queue_and_lease(self.waiting)
        self.reads.queue_and_lease(self.waiting)

    @rule()
    def unlease(self) -> None:
        self.spec.is_leased[:] = False
        self.arrays["is_leased"][:] = 0
        self.waiting = []

    @rule(advice=st.lists(st.integers(0, COUNT - 1), max_size=8))
    def advise(self, advice: list[int]) -> None:
        self.spec.advise(advice)
        self.reads.advise(advice)

    @rule()
    def read(self) -> None:
        run = self.spec.next_read()
        assert self.reads.next_read() == run
        self.loading += run

    @precondition(lambda self: getattr(self, "loading", None))
    @rule(data=st.data(), fails=st.sampled_from((False, False, True)))
    def end(self, data: st.DataObject, fails: bool) -> None:
        index = self.loading.pop(data.draw(st.integers(0, len(self.loading) - 1)))
        (self.spec.fail_read if fails else self.spec.arrive)(index)
        (self.reads.fail_read if fails else self.reads.arrive)(index)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "spec"):
            return
        for name in NAMES:
            assert np.array_equal(self.arrays[name], getattr(self.spec, name)), name
        assert (self.reads.demand, self.reads.advice) == (list(self.spec.demand), list(self.spec.advice))
        assert self.reads.used_bytes == self.spec.used_bytes == self.reads.audit()[1]
        assert CacheStats(*self.arrays["counts"].tolist()) == self.spec.stats
        for name in ("heat", "last_used", "uses"):
            own, other = getattr(self.records, name), getattr(self.spec_records, name)
            assert own.tobytes() == other.tobytes(), name


TestBothMachine = BothMachine.TestCase
TestBothMachine.settings = settings(stateful_step_count=40)


@pytest.mark.parametrize(
    "broken, told",
    [
        ({"policy": "fifo"}, "policy: expected lrfu, lru, lfu, edgemoe, hobbit or hobbit-printed, found fifo"),
        ({"weights": (0.5, 0.5)}, "expected four weights"),
        ({"frequency": [0.5]}, "expected four weights, and a frequency"),
        ({"high": [COUNT] * COUNT}, "a high version and a layer of each expert"),
        ({"encoder_layers": LAYERS}, "encoder_layers: expected fewer than all layers"),
        ({"encoder_layers": -1}, "encoder_layers: expected fewer than all layers"),
        ({"num_layers": LAYERS - 1}, "a high version and a layer of each expert"),
        ({"next_in_file": [COUNT] * COUNT}, "next_in_file: expected experts or -1"),
        ({"readers": 0}, "at least one reader"),
        ({"most_queued": -1}, "at least one reader"),
        ({"weights": (0.5, 0.5, float("nan"), 0.0)}, "expected finite weights and frequencies"),
        ({"frequency": [float("inf")] * COUNT}, "expected finite weights and frequencies"),
        ({"sizes": [1] * (COUNT - 1)}, "expected one per expert"),
    ],
)
def test_what_does_not_fit_together_is_refused(broken: dict[str, Any], told: str) -> None:
    good: dict[str, Any] = {"sizes": [1] * COUNT, "policy": "lru", "next_in_file": [NONE] * COUNT, "readers": 1}
    native(capacity=9, pins=0, **good)
    with pytest.raises(ValueError, match=told):
        native(capacity=9, pins=0, **(good | broken))


def test_experts_that_are_not_there_are_refused() -> None:
    reads, _, _ = native([1] * COUNT, 9, 0, "lru", [NONE] * COUNT, 1)
    for call in (
        lambda: reads.request_and_queue(0, [COUNT]),
        lambda: reads.prefetch([-1]),
        lambda: reads.unlease([COUNT]),
    ):
        with pytest.raises(ValueError, match=f"expected experts below {COUNT}, found"):
            call()


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_layers_that_are_not_there_are_refused(layer: int) -> None:
    reads, _, _ = native([1] * COUNT, 9, 0, "lru", [NONE] * COUNT, 1)
    for call in (reads.request, reads.request_and_queue):
        with pytest.raises(ValueError, match=f"layer: expected one below {LAYERS}, found {layer}"):
            call(layer, [0])


def test_advice_about_a_whole_layer_evicts_only_for_what_is_read() -> None:
    """A reader of its own begins one read. The others of the layer wait, and evict nothing before they are read."""
    layer = list(range(EXPERTS, 2 * EXPERTS))
    for most_queued, kept in ((1, EXPERTS - 1), (0, 0)):
        sizes, breaks = [1] * COUNT, [NONE] * COUNT
        reads, arrays, _ = native(sizes, EXPERTS, EXPERTS, "lru", breaks, 1, most_queued=most_queued)
        reads.request_and_queue(0, list(range(EXPERTS)))
        for _ in range(EXPERTS):
            for index in reads.next_read():
                reads.arrive(index)
        reads.unlease(list(range(EXPERTS)))
        arrays["is_leased"][:] = 0
        reads.advise(layer)
        assert (arrays["state"][:EXPERTS] != 0).sum() == kept
        assert len(reads.advice) == EXPERTS - kept
        reads.request(1, layer[-1:])
        assert set(reads.advice) <= {layer[-1]}  # the layer has chosen: the others are not read any more


def test_the_next_expert_is_queued_as_soon_as_a_read_begins() -> None:
    reads, _, _ = native([1] * COUNT, COUNT, COUNT, "lru", [NONE] * COUNT, 1, most_queued=1)
    reads.advise([3, 1, 2])
    assert reads.advice == [3]
    assert [reads.next_read(), reads.next_read(), reads.next_read(), reads.next_read()] == [[3], [1], [2], []]


def test_a_finished_layer_of_an_encoder_is_evicted_before_any_layer_of_the_decoder() -> None:
    """Although the policy would keep its expert, which calibration saw most."""
    own = fresh_records(encoder_layers=1)
    spec = Residency(CacheSpec(np.full(COUNT, 10), 30, own), partial(eviction_order, own, score_of("lrfu")))
    reads, arrays, _ = native([10] * COUNT, 30, 0, "lrfu", [NONE] * COUNT, 1, encoder=1)
    for layer, expert in ((1, 5), (2, 10), (0, 4), (1, 6)):
        for cache, leases in ((spec, spec.is_leased), (reads, arrays["is_leased"])):
            _, misses = cache.request(layer, [expert])
            cache.queue_and_lease(misses)
            assert cache.next_read() == [expert]
            cache.arrive(expert)
            leases[:] = 0
    assert np.flatnonzero(spec.state).tolist() == np.flatnonzero(arrays["state"]).tolist() == [5, 6, 10]
