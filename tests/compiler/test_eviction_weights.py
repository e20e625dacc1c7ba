"""A compile fits the weights of HOBBIT's eviction score, and keeps them where they read less of held-out texts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.cli.simulation import compile_eviction
from moec.cli.simulation.compile_eviction import fit_to_texts
from moec.compiler.request.options import Talk
from moec.compiler.request.ports import FittedEviction, RoutedText
from moec.manifests.bundle import EVICTION_NAME
from moec.manifests.errors import BundleError
from moec.runtime import load
from moec.runtime.bundle.eviction_weights import fitted_weights
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.expert_cache.policies import DEFAULT_WEIGHTS
from tests.listed_file import add_listed
from tests.tiny_compile import check_bundle, compile_tiny, save_model, save_texts

WEIGHTS = {"lru": 0.25, "lfu": 0.5, "lhu": 0.0, "fld": 0.25}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("eviction") / "tiny", layers=3, experts=4)


@pytest.fixture(scope="module")
def plain_bundle(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle without fitted weights; read only."""
    path = tmp_path_factory.mktemp("plain") / "bundle"
    compile_tiny(model, path, "uniform", 4)
    return path


def options(folder: Path, train: int, validation: int = 8) -> dict[str, Any]:
    data = save_texts(folder / "texts", train=train, validation=validation)
    return {"data": str(data), "tasks": ("perplexity",)}


def always_better(*given: Any) -> FittedEviction:
    return FittedEviction(WEIGHTS, True, {"weights": WEIGHTS, "texts": len(given[1]), "held_out_texts": len(given[2])})


def test_a_compile_keeps_what_reads_less(model: Path, tmp_path: Path) -> None:
    compile_tiny(model, tmp_path / "out", "uniform", 4, fit_eviction=always_better, **options(tmp_path, 10))
    quality = check_bundle(tmp_path / "out")
    assert quality["eviction"] == {"weights": WEIGHTS, "texts": 10, "held_out_texts": 8}
    with open_bundle(tmp_path / "out") as bundle:
        assert bundle.manifest.format_version == 1 and fitted_weights(bundle) == "0.25,0.5,0,0.25"
    with load(tmp_path / "out", context=64, expert_cache="50%", policy="hobbit") as engine:
        assert "policy hobbit 0.25,0.5,0,0.25," in engine.mode
    with load(tmp_path / "out", context=64, policy="hobbit", policy_weights="1,0,0,0") as engine:
        assert engine.options.policy_weights == "1,0,0,0", "a named option comes first"
    for policy in ("hobbit-printed", "lrfu"):
        with load(tmp_path / "out", context=64, policy=policy) as engine:
            assert engine.options.policy_weights is None


def test_a_compile_leaves_what_reads_more(model: Path, tmp_path: Path) -> None:
    def worse(*given: Any) -> FittedEviction:
        return replace(always_better(*given), is_better=False)

    compile_tiny(model, tmp_path / "out", "uniform", 4, fit_eviction=worse, **options(tmp_path, 10))
    assert "eviction" in check_bundle(tmp_path / "out") and not (tmp_path / "out" / EVICTION_NAME).exists()
    with load(tmp_path / "out", context=64, expert_cache="50%", policy="hobbit") as engine:
        assert engine.options.policy_weights is None and "policy hobbit," in engine.mode


@pytest.mark.parametrize("counts", [(4, 8), (10, 3)])
def test_few_texts_are_told(model: Path, tmp_path: Path, counts: tuple[int, int]) -> None:
    notes = list[str]()
    given: dict[str, Any] = {"fit_eviction": always_better, "talk": Talk(notes.append), **options(tmp_path, *counts)}
    assert "eviction" not in compile_tiny(model, tmp_path / "out", "uniform", 4, **given).quality
    told = f"they need 8 train and validation texts, found {counts[0]} and {counts[1]}"
    assert any(told in note for note in notes)


def test_equal_compiles_fit_equal_weights(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By replays, whatever the threads of the runtime that routes."""
    from moec.runtime import kernels

    monkeypatch.setattr(compile_eviction, "SHARES", (0.5,))
    seen = list[Any]()

    def fitted(bundle: Path, training: Any, held_out: Any, progress: Callable[[int, int], None]) -> Any:
        seen.append(fit_to_texts(bundle, training[:4], held_out[:4], progress))
        return seen[-1]

    for name, threads in (("one", 1), ("two", 2)):
        monkeypatch.setattr(kernels, "set_threads", lambda count, own=kernels.set_threads, most=threads: own(most))
        given = {"fit_eviction": fitted, **options(tmp_path / name, 10)}
        compile_tiny(model, tmp_path / f"{name}-out", "uniform", 4, **given)
        monkeypatch.undo()
        monkeypatch.setattr(compile_eviction, "SHARES", (0.5,))
    assert seen[0] is not None and seen[0].record == seen[1].record
    files = [(tmp_path / f"{name}-out" / "quality.json").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1] and json.loads(files[0])["eviction"]["kept"] == seen[0].is_better


def cycling(experts: int, layers: int, tokens: int) -> RoutedText:
    """A text whose tokens use one expert all the time, and the others in turn, in layers of two experts per token."""
    chosen = [[0, 1 + token % (experts - 1)] for token in range(tokens)]
    return RoutedText(1, {layer: np.array(chosen, np.int32) for layer in range(layers)})


def test_weights_are_fitted_to_the_texts(plain_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fitting again gives the same weights, and held-out texts decide."""
    texts = [cycling(4, 3, 12)] * 2
    steps = list[tuple[int, int]]()
    found = fit_to_texts(plain_bundle, texts, texts, lambda done, total: steps.append((done, total)))
    assert found is not None and sum(found.weights.values()) == 1
    assert found.record["held_out_ratio"] == found.record["fitted_ratio"]
    assert found.is_better == (found.record["held_out_interval95"][1] < 1) and steps[-1] == (1, 1)
    monkeypatch.setattr(compile_eviction, "SHARES", (1.0,))
    assert fit_to_texts(plain_bundle, texts, texts, lambda done, total: None) is None, "nothing is evicted"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "eviction.json"),
        (b"[]", "expected an object of `hobbit`"),
        (b'{"hobbit":1}', "`hobbit`: expected an object of lru, lfu, lhu, fld"),
        (b'{"hobbit":{"lru":1}}', "`hobbit`: expected an object of lru, lfu, lhu, fld"),
        (b'{"hobbit":{"lru":true,"lfu":0,"lhu":0,"fld":0}}', "expected numbers of 0 to 1"),
        (b'{"hobbit":{"lru":1e999,"lfu":0,"lhu":0,"fld":0}}', "eviction.json"),
        (b'{"hobbit":{"lru":2,"lfu":-1,"lhu":0,"fld":0}}', "expected numbers of 0 to 1"),
        (b'{"hobbit":{"lru":0.5,"lfu":0,"lhu":0,"fld":0}}', "`0.5,0,0,0` is not four weights that add up to 1"),
        (b" " * 5000, "eviction.json"),
    ],
)
def test_damaged_weights_are_refused(plain_bundle: Path, tmp_path: Path, content: bytes, message: str) -> None:
    path = add_listed(Path(shutil.copytree(plain_bundle, tmp_path / "out")), EVICTION_NAME, content)
    with pytest.raises(BundleError, match=re.escape(message)):
        load(path, context=64, policy="hobbit")
    with load(path, context=64) as engine:
        assert engine.options.policy == "lrfu", "a run that does not read them is not refused"


def test_the_default_stays_without_the_file(plain_bundle: Path) -> None:
    with open_bundle(plain_bundle) as bundle:
        assert fitted_weights(bundle) is None
    assert DEFAULT_WEIGHTS.to_text() == "0.0625,0.75,0,0.1875"
