"""Lossy modes in one call of a layer: the bits, decisions and advice of PassChoice, their specification."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.runtime import Engine, kernels, load
from moec.runtime.engine.open_engine import LossyDecoder
from moec.runtime.expert_cache.native_cache import NativeCache
from moec.runtime.model.one_call import PASS_RULES
from moec.runtime.modes.expert_choice import PassChoice
from moec.runtime.modes.logical_cache import NativeLogicalCache
from tests.gates.bundles import emit_bundle
from tests.pruned_mixtral import PRUNED, save_whole
from tests.runtime.watched_layers import watched_layers
from tests.tiny_families import TINY_FAMILIES, save_tiny_family

pytestmark = pytest.mark.skipif(kernels.compiled() is None, reason="no extension")

PRECISION, ROUTING, LITTLE = "dynamic-precision 0.3,0.7", "cache-routing margin=0.5,drop=0.2", "big-little gamma=0.055"
SKIPS = "dynamic-precision 0.4,0.4"
ALL = f"{LITTLE} + {ROUTING} + {PRECISION}"
DECISIONS = ("lookups", "hits", "misses", "evictions", "reads", "rereads", "bytes_read")


class Decoded:
    """Logits, decisions, advice and learned thresholds of an engine: prompts, single tokens, several sequences."""

    def __init__(self, engine: Engine) -> None:
        cache, model = engine.cache, engine.model
        assert isinstance(cache, NativeCache) and isinstance(engine.lossy, LossyDecoder)
        assert cache.reads.resize(cache.capacity_bytes, 0)  # nothing is read ahead, so no decision depends on time
        with watched_layers() as watched:
            self.rows = self.run(engine)
        self.calls, self.advice = watched.calls, watched.advice
        self.counts = asdict(engine.lossy.counts)
        self.stats = [getattr(cache.stats, name) for name in DECISIONS]
        self.logical = None if engine.lossy.cache is None else engine.lossy.cache.bytes_read
        self.quality = (dict(model.prefetch_quality.demanded), dict(model.prefetch_quality.predicted))
        learned = model.advisor.thresholds if model.pass_experts is None else model.pass_experts
        self.thresholds = [learned.threshold(*pair) for pair in ((0, 1), (0, 2), (1, 2), (2, 0))]
        assert not cache.leased().size
        cache.check_invariants()

    @staticmethod
    def run(engine: Engine) -> list[np.ndarray]:
        random = np.random.default_rng(6)
        rows = []
        for slot, length in enumerate((9, 1, 30)):
            engine.begin_sequence()
            tokens = random.integers(4, 60, length).tolist()
            rows.append(engine.step(tokens, [slot] * length, range(length)).copy())
        rows += [engine.decode([int(random.integers(4, 60))], [0], [at]) for at in range(9, 40)]
        engine.begin_sequence()
        for step in range(12):
            tokens, slots = random.integers(4, 60, 3).tolist(), [2, 0, 1]
            rows.append(engine.decode(tokens, slots, [30 + step, 40 + step, 1 + step]))
        return rows


def both(path: Path, **options: Any) -> Decoded:
    """Decode in one call and in steps. Everything must agree."""
    runs = []
    for is_native in (True, False):
        small = {"context": 64, "slots": 3, "expert_cache": "50%", "cache_state": "cold"}
        with load(path, **small | options) as engine:
            assert engine.model.pass_experts is not None and "layers in one call" in engine.mode
            if not is_native:
                engine.model.pass_experts = None
            runs.append(Decoded(engine))
    one, steps = runs
    assert one.calls and not steps.calls and len(one.advice) == len(steps.advice)
    assert all(np.array_equal(*rows, equal_nan=True) for rows in zip(one.rows, steps.rows, strict=True))
    assert one.counts == steps.counts and one.stats == steps.stats and one.logical == steps.logical
    assert one.advice == steps.advice and one.quality == steps.quality
    assert one.thresholds == pytest.approx(steps.thresholds, rel=1e-12)
    return one


@pytest.mark.parametrize("lossy", [PRECISION, SKIPS, ROUTING, LITTLE, f"{ROUTING} + {PRECISION}", ALL])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefetch": "off"},
        {"prefetch_layers": 3, "policy": "hobbit"},
        {"prefetch": "path", "prefetch_rule": "spread", "policy": "edgemoe"},
        {"prefetch": "popularity", "prefetch_rule": "until-routed"},
        {"prefetch_rule": "first-miss", "policy": "lru"},
        {"prefetch_experts": 3},
    ],
    ids=str,
)
def test_one_call_decides_as_the_steps_do(two_version_bundle: Path, lossy: str, options: dict[str, Any]) -> None:
    found = both(two_version_bundle, lossy=lossy, **options)
    counts = found.counts
    assert any(found.advice) == (options.get("prefetch") != "off")
    assert bool(counts["low"]) == ("0.3,0.7" in lossy) and bool(counts["prompt_skipped"]) == ("precision" in lossy)
    assert bool(counts["replaced"] and counts["dropped"]) == ("cache-routing" in lossy)
    assert (0 < counts["fallback_tokens"] < counts["tokens"]) == ("big-little" in lossy)
    assert (0 < counts["foretold_right"] < counts["foretold"]) == ("big-little" in lossy)


@pytest.mark.parametrize(
    "family",
    [
        "deepseek-v3",
        "deepseek-v2-groups-yarn",
        "gemma4-own-values",
        "gpt-oss",
        "kolibri-listed",
        "laguna",
        "afmoe-listed",
    ],
)
def test_routers_of_every_kind(family: str, tmp_path: Path) -> None:
    folder = save_tiny_family(tmp_path / "model", TINY_FAMILIES[family])
    path = emit_bundle(folder, tmp_path / "bundle", bitwidth=8, low="q2g32")
    found = both(path, lossy=f"{LITTLE},k=1 + {ROUTING} + dynamic-precision 0.1,0.6", expert_cache="60%")
    assert found.counts["replaced"] + found.counts["dropped"] and found.counts["prompt_low"]


def test_a_router_that_weighs_two(tmp_path: Path) -> None:
    folder = save_tiny_family(tmp_path / "model", TINY_FAMILIES["phimoe"])
    path = emit_bundle(folder, tmp_path / "bundle", bitwidth=8, low="q2g32")
    found = both(path, lossy="big-little gamma=1 + dynamic-precision 0.1,0.6", expert_cache="60%")
    assert found.counts["low"] + found.counts["skipped"]


def test_experts_that_are_left_out_are_neither_chosen_nor_stand_in(tmp_path: Path) -> None:
    path = emit_bundle(save_whole(tmp_path / "model"), tmp_path / "bundle", pruned=PRUNED)
    found = both(path, lossy=f"{LITTLE} + {ROUTING} + {SKIPS}")
    assert found.counts["replaced"]


def test_many_sequences_of_a_little_model_look_two_layers_ahead(two_version_bundle: Path) -> None:
    """Forty sequences need nearly all experts, however few the little model has."""
    advice = []
    options: dict[str, Any] = {"lossy": "big-little gamma=0,k=1", "slots": 40, "prefetch_rule": "first-miss"}
    for is_native in (True, False):
        with load(two_version_bundle, context=16, expert_cache="95%", **options) as engine:
            engine.cache.finish_warming()
            engine.model.advisor.holds = lambda index: True  # of steps; the cache of the run has nearly all
            if not is_native:
                engine.model.pass_experts = None
            engine.begin_sequence()
            with watched_layers() as watched:
                engine.decode(list(range(4, 44)), range(40), [0] * 40)
            advice.append(watched.advice[0])
    assert {index // 8 for index in advice[1]} == {1, 2}
    assert advice[0] == advice[1]


def test_a_choice_with_other_parts_takes_the_steps(two_version_bundle: Path) -> None:
    with load(two_version_bundle, context=64, expert_cache="50%", lossy=ROUTING) as engine:
        one_call, lossy = engine.model.pass_experts, engine.lossy
        assert one_call is not None and lossy is not None
        own = PassChoice(lossy.modes, lossy.versions, lossy.cache, lossy.counts)
        other = PassChoice(replace(lossy.modes), lossy.versions, lossy.cache, lossy.counts)
        assert one_call.can_decide(own) and not one_call.can_decide(other)


def test_other_rules_take_the_steps(two_version_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement of PassChoice that draws its decisions, as benchmarks with random weights do."""

    class Never(PassChoice):
        def is_dropped(self, share: float, drop: float) -> bool:
            return False

    with load(two_version_bundle, context=64, expert_cache="50%", lossy=ROUTING) as engine:
        lossy = engine.lossy
        assert lossy is not None and isinstance(lossy.cache, NativeLogicalCache)
        engine.lossy = LossyDecoder(lossy.modes, lossy.model, lossy.versions, lossy.cache, Never)
        monkeypatch.setattr(kernels, "experts_layer", lambda *_: pytest.fail("one call"))
        engine.begin_sequence()
        engine.prefill([5, 6, 7])
        for at in range(3, 20):
            engine.decode([at + 7], [0], [at])
        assert engine.lossy.counts.replaced and not engine.lossy.counts.dropped


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"low_above": 1.5}, "low_above: expected a number from 0 to 1"),
    ({"drop": float("nan")}, "drop: expected a number from 0 to 1"),
    ({"little_experts": -1}, "little_experts: expected at least 0"),
    ({"cache": None}, "a mode decides by it"),
    ({"cache": 3}, "a logical cache of the extension"),
    ({"low": [24] * 24}, "different stored low versions"),
    ({"low": [-1] * 24}, "every stored low version once"),
    ({"low": [-1] * 60}, "every stored low version once"),
]


@pytest.mark.parametrize(("changed", "told"), BROKEN, ids=str)
def test_modes_that_do_not_fit_are_refused(two_version_bundle: Path, changed: dict[str, Any], told: str) -> None:
    with load(two_version_bundle, context=64, expert_cache="50%", lossy=ALL) as engine:
        one_call, lossy = engine.model.pass_experts, engine.lossy
        assert one_call is not None and lossy is not None and isinstance(engine.cache, NativeCache)
        fields = [one_call.fields(at) for at in range(3)]
        modes = one_call.lossy.to_plain() | changed  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=told):
            engine.cache.bind_layers(fields, engine.model.spec.hidden_size, 1e-6, PASS_RULES, None, modes)


@pytest.mark.parametrize("changed", [{"experts": 7}, {"counts": [(9, 0, 0, 0)] * 3}], ids=str)
def test_predictions_that_do_not_fit_are_refused(two_version_bundle: Path, changed: dict[str, Any]) -> None:
    with load(two_version_bundle, context=64, expert_cache="50%", lossy=ALL) as engine:
        one_call = engine.model.pass_experts
        assert one_call is not None and isinstance(engine.cache, NativeCache)
        fields = [one_call.fields(at) for at in range(3)]
        fields[0]["ahead"] = [fields[0]["ahead"][0]._replace(**changed)]
        modes = one_call.lossy.to_plain()  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="expected the experts of the predicted layer"):
            engine.cache.bind_layers(fields, engine.model.spec.hidden_size, 1e-6, PASS_RULES, None, modes)


def test_passes_that_do_not_fit_are_refused(two_version_bundle: Path) -> None:
    with load(two_version_bundle, context=64, expert_cache="50%", lossy=ROUTING) as engine:
        native = engine.model.pass_experts.native  # type: ignore[union-attr]
        for kind, foretold, told in (
            ("some", {}, "expected exact, prompt, all, little or again"),
            ("little", {}, "without a little model"),
            ("all", {0: np.zeros((1, 7), np.float32)}, "foretold"),
            ("all", {9: np.zeros((1, 8), np.float32)}, "a layer below 3"),
            ("all", {0: np.zeros((1, 8), np.float32), 1: np.zeros((2, 8), np.float32)}, "foretold"),
        ):
            with pytest.raises(ValueError, match=told):
                native.begin_pass(kind, foretold)
        with pytest.raises(ValueError, match="sequences: expected at least 1"):
            native.run(0, np.zeros((1, engine.model.spec.hidden_size), np.float32), 0)
        with pytest.raises(ValueError, match="foretold: found a value of another type"):
            native.begin_pass("all", {"first": np.zeros((1, 8), np.float32)})
        native.begin_pass("all", {0: np.zeros((2, 8), np.float32)})
        with pytest.raises(ValueError, match="foretold"):  # a refused call changes nothing
            native.begin_pass("all", {0: np.zeros((1, 7), np.float32)})
        with pytest.raises(ValueError, match="hidden"):
            native.run(0, np.zeros((1, engine.model.spec.hidden_size), np.float32))
        logical = engine.lossy.cache.native  # type: ignore[union-attr]
        for call in (lambda: logical.is_resident(48), lambda: logical.fill([-1]), lambda: logical.serve(3, [], [])):
            with pytest.raises(ValueError, match="expected"):
                call()
    with load(two_version_bundle, context=64, expert_cache="50%") as engine:
        native = engine.model.pass_experts.native  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="no lossy mode was given"):
            native.begin_pass("all")
        with pytest.raises(ValueError, match="no lossy mode was given"):
            native.take_counts()
