"""One call a layer where something is wrong: damage, closing, forks, signals, arguments that do not fit."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.manifests.errors import ChecksumMismatch, ExecutionError, MemoryBudgetExceeded
from moec.runtime import Engine, kernels, load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.expert_cache.native_cache import NativeCache
from moec.runtime.model.one_call import PASS_RULES, AheadCounts, PredictedLayer
from moec.runtime.storage.readers import ReaderThreads
from tests.runtime.cache_kinds import kernels_of
from tests.runtime.faulty_source import PATIENCE_S, InTime
from tests.runtime.model.test_one_call import EXPERTS, LAYERS, bundle, calls, in_one_call, steps_only

__all__ = ["bundle", "calls"]  # fixtures

pytestmark = pytest.mark.skipif(kernels.compiled() is None, reason="no extension")


def test_damage_is_told_and_what_was_asked_for_is_given_back(
    bundle: Path, tmp_path: Path, in_time: InTime, calls: list[int]
) -> None:
    own = Path(shutil.copytree(bundle, tmp_path / "own"))
    stored = open_bundle(own).manifest.stored_experts
    for entry in stored[EXPERTS : 2 * EXPERTS]:  # every expert of layer 1
        content = bytearray((own / entry.file).read_bytes())
        content[entry.offset_bytes] ^= 1
        (own / entry.file).write_bytes(content)
    with load(own, expert_cache="100%", context=64, cache_state="cold", prefetch="off") as engine:
        in_one_call(engine)
        for _ in range(2):
            with pytest.raises(ChecksumMismatch, match="of layer 1: bytes differ"):
                in_time(lambda: engine.decode([5], [0], [0]))
            cache = engine.cache
            assert isinstance(cache, NativeCache) and not cache.leased().size
            cache.check_invariants()
    assert calls == [0, 1] * 2


def test_closed_forked_too_small_and_other_kernels(
    bundle: Path, in_time: InTime, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(bundle, expert_cache="50%", context=64) as engine:
        in_one_call(engine)
        cache = engine.cache
        assert isinstance(cache, NativeCache)
        with kernels_of("numpy"):
            for call in (lambda: engine.model.forward(*_one_token(engine)), lambda: next(cache.stream(0, [0]))):
                with pytest.raises(ExecutionError, match="kernels were changed"):
                    call()
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: -1)
            with pytest.raises(ExecutionError, match="forked"):
                engine.model.forward(*_one_token(engine))
        while not cache.reads.resize(4096, 0):
            pass
        assert not calls
        with pytest.raises(MemoryBudgetExceeded, match="does not fit into the expert cache of 4096"):
            in_time(lambda: engine.model.forward(*_one_token(engine)))
        assert calls == [0]
        cache.close()
        with pytest.raises(ExecutionError, match="closed"):
            in_time(lambda: engine.model.forward(*_one_token(engine)))
        assert not cache.leased().size
    with load(bundle, expert_cache="50%", context=64, cache_state="cold") as engine:
        cache = engine.cache
        assert isinstance(cache, NativeCache)
        cache.close()
        started = list[object]()
        monkeypatch.setattr(ReaderThreads, "start", started.append)
        with pytest.raises(ExecutionError, match="closed"):
            engine.model.forward(*_one_token(engine))
        assert not started


def _one_token(engine: Engine) -> tuple[Any, ...]:
    place = np.zeros(1, np.int32)
    return np.array([5], np.int64), place, place, engine.kv


class _Interrupted(Exception):
    """The error that a signal handler of the user raises."""


@pytest.mark.parametrize("decodes", [False, True])
def test_a_signal_comes_through_while_a_layer_waits(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, calls: list[int], decodes: bool
) -> None:
    """The handler's exception comes out, nothing stays leased, and the engine goes on; it may decode meanwhile."""
    engines, gate, found_meanwhile = list[Engine](), threading.Event(), list[np.ndarray]()

    def handle(number: int, frame: object) -> None:
        if not decodes:
            raise _Interrupted
        gate.set()
        with pytest.raises(ValueError, match="a layer is being computed"):
            engines[0].model.pass_experts.forget_guesses()  # type: ignore[union-attr]
        found_meanwhile.append(engines[0].model.forward(*_one_token(engines[0])))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with load(bundle, expert_cache="50%", context=64, cache_state="cold", prefetch="off") as engine:
            in_one_call(engine)
            engines.append(engine)
            cache = engine.cache
            assert isinstance(cache, NativeCache)
            load_one, first = engine.storage.load, threading.Lock()

            def load_late(*run: int) -> None:
                if first.acquire(blocking=False):
                    os.kill(os.getpid(), signal.SIGUSR1)
                gate.wait(PATIENCE_S)
                load_one(*run)

            monkeypatch.setattr(engine.storage, "load", load_late)
            if decodes:
                found = engine.model.forward(*_one_token(engine))
                assert np.array_equal(found, found_meanwhile[0])
            else:
                with pytest.raises(_Interrupted):
                    engine.model.forward(*_one_token(engine))
            assert not cache.leased().size
            gate.set()
            found = engine.model.forward(*_one_token(engine))
            assert calls[-LAYERS:] == list(range(LAYERS))
            steps_only(engine)
            assert np.array_equal(engine.model.forward(*_one_token(engine)), found)
    finally:
        signal.signal(signal.SIGUSR1, before)


def wrong_fields(fields: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return changes of the fields of a layer, and what the refusal of each says."""
    short, norms = fields["experts"][:-1], np.ones(3, np.float32)
    norm = fields["experts_norm"]
    counts = AheadCounts(3, -1, 12, 2)
    known = PredictedLayer(1, 1, 12, 12, [counts], False)
    right = known._replace(router=fields["router"], norm=norm)
    return [
        ({"experts": short}, "experts: expected 12"),
        ({"experts": [3] * 12}, "experts of the extension"),
        ({"experts": [None] * 12}, "expected at least 3 that are not left out, found 0"),
        ({"shared": 3}, "experts of the extension"),
        ({"norm_eps": "x"}, "norm_eps: found a value of another type"),
        ({"top_k": 13}, "experts: expected 12"),
        ({"top_k": 0}, "experts: expected 12"),
        ({"experts_norm": norms}, "experts_norm"),
        ({"router": 3}, "router: expected a packed matrix"),
        ({"router": None}, "experts: expected 0"),
        ({"router_bias": np.zeros(11, np.float32)}, "router_bias"),
        ({"first_expert": 30}, "first_expert: expected experts below 36"),
        ({"rule": 3}, "rule: found a value of another type"),
        (
            {"rule": ("tanh", None, 1, 1, False, 0.0, False, 1e-20)},
            "rule: expected softmax, sigmoid or sparsemixer, found tanh",
        ),
        *(
            ({"rule": ("sigmoid", None, groups, kept, False, 0.0, False, 1e-20)}, "rule: expected groups of equal size")
            for groups, kept in ((0, 0), (5, 1), (4, 0), (4, 5), (2**62, 1))
        ),
        (
            {"rule": ("sigmoid", None, 12, 2, False, 0.0, False, 1e-20)},
            "rule: expected at most 2 experts of a token, found 3",
        ),
        (
            {"rule": ("sparsemixer", None, 1, 1, False, 0.1, False, 1e-20)},
            "rule: expected at most 2 experts of a token, found 3",
        ),
        ({"rule": ("sigmoid", norm, 1, 1, False, 0.0, False, 1e-20)}, "correction"),
        ({"shared_router": fields["router"]}, "shared_router: expected one row and a shared expert, found 12 rows"),
        ({"norm_bias": norms}, "norm_bias"),
        ({"experts_after_norm": norms}, "experts_after_norm"),
        ({"ahead": [right._replace(bias=norm)]}, "router_bias"),
        ({"ahead": [right._replace(norm_bias=norms)]}, "norm_bias"),
        ({"ahead": [right._replace(scoring=("none", None, 1, 1, False, 0.0, False, 1e-20))]}, "rule: expected softmax"),
        ({"ahead": [right._replace(first_expert=30)]}, "first_expert"),
        ({"ahead": [right._replace(norm=norms)]}, "norm"),
        *(
            ({"ahead": [right._replace(counts=[counts._replace(top_k=top_k)])]}, "a top-k of 1 to 36")
            for top_k in (0, 2**63 - 1)
        ),
        ({"ahead": [right._replace(counts=[])]}, "counts of one kind of passes"),
        ({"low_experts": [None]}, "low_experts: expected one of each expert under lossy modes, else none"),
        ({"ahead": [right._replace(rank=0)]}, "a rank of at least 1"),
        ({"ahead": [right._replace(counts=[counts._replace(advised_each=-1)])]}, "a top-k of 1 to 36"),
        ({"ahead": [right._replace(counts=[counts._replace(advised=-2)])]}, "a top-k of 1 to 36"),
        ({"ahead": [right._replace(experts=2**62)]}, "a rank of at least 1"),
        ({"ahead": [known._replace(known_experts=[12], known_scores=[1.0])]}, "known experts: expected some below 12"),
        ({"layer": 1}, "layer: expected the place in the list, 0, found 1"),
        ({"capacity": -1}, "capacity: expected at least 0"),
        ({"ahead": [known._replace(known_experts=[1])]}, "a score for each"),
        ({"ahead": [known._replace(path=(0, -1))]}, "expected paths, and two layers"),
        ({"ahead": [right] * 9}, "at most 8 routers"),
    ]


def test_what_does_not_fit_is_refused(bundle: Path) -> None:
    with load(bundle, expert_cache="50%", context=64) as engine:
        layers = engine.model.pass_experts
        assert layers is not None
        native = layers.native
        with pytest.raises(ValueError, match="hidden"):
            native.run(0, np.zeros((1, engine.model.spec.hidden_size + 1), np.float32))
        with pytest.raises(ValueError, match="at least one token"):
            native.run(0, np.zeros((0, engine.model.spec.hidden_size), np.float32))
        for at in (-1, LAYERS):
            with pytest.raises(ValueError, match="expected a layer below 3"):
                native.run(at, np.zeros((1, engine.model.spec.hidden_size), np.float32))
        fields, size = layers.fields(0), engine.model.spec.hidden_size
        cache = engine.cache
        assert isinstance(cache, NativeCache)
        for change, told in wrong_fields(fields):
            with pytest.raises(ValueError, match=told):
                cache.bind_layers([fields | change], size, 1e-5, PASS_RULES)
        with pytest.raises(ValueError, match="expected `experts_norm`"):
            cache.bind_layers(
                [{name: value for name, value in fields.items() if name != "experts_norm"}], size, 1e-5, PASS_RULES
            )
        with pytest.raises(ValueError, match="a dictionary for each"):
            cache.bind_layers([3], size, 1e-5, PASS_RULES)  # type: ignore[list-item]
        with pytest.raises(ValueError, match="expected `wrong`"):
            cache.bind_layers([fields], size, 1e-5, {})
        for other in (0, size + 1):
            with pytest.raises(ValueError, match=r"size|norm"):
                cache.bind_layers([fields], other, 1e-5, PASS_RULES)
