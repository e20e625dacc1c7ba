"""Whole compiles whose memory holds one layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.compiler.request.targets import TargetKind
from moec.compiler.walker.memory import KeptLayers
from moec.evaluation.data import load_splits
from moec.evaluation.run import evaluate
from moec.manifests.errors import OptionError
from moec.manifests.model import ExpertKey
from moec.manifests.quant import QuantSpec
from moec.runtime.bundle.open_bundle import open_bundle
from tests.tiny_compile import check_bundle, compile_tiny, contents, save_model, save_texts
from tests.transformers_oracle import TransformersOracle


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer stays in memory."""
    monkeypatch.setattr(
        "moec.compiler.preflight.preparation.choose_kept_layers", lambda *_: KeptLayers(0, holds_model=False)
    )


def test_a_whole_compile_layer_by_layer(little_memory: None, tmp_path: Path) -> None:
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    options = {"data": str(texts), "tasks": ("perplexity",), "bits": (2, 3, 4), "group_sizes": (32,)}
    for name in ("one", "two"):
        result = compile_tiny(model, tmp_path / name, "bits_per_weight", 4.0, quick=False, **options)
    quality = check_bundle(tmp_path / "one")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert result.plan.bits_per_weight <= 4.0 and len(set(result.plan.units.values())) > 1
    assert quality["trials"][-1]["kl"]["mean"] > 0
    held_out = quality["held_out_kl"]["perplexity"]
    assert quality["verdict"] == "measured" and held_out["items"] == 40
    assert 0.2 < held_out["mean"] / quality["trials"][-1]["kl"]["mean"] < 5
    assert not (tmp_path / "one.work").exists()


def test_a_kl_target_layer_by_layer(little_memory: None, tmp_path: Path) -> None:
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    options = {
        "data": str(texts),
        "tasks": ("perplexity",),
        "bits": (2, 3, 4, 8),
        "group_sizes": (32,),
        "dense_bits": 8,
    }
    result = compile_tiny(model, tmp_path / "out", "kl", 0.05, quick=False, **options)
    measured = [trial["kl"]["mean"] for trial in result.quality["trials"] if trial["purpose"] == "search"]
    assert min(measured) <= 0.05


def test_experts_are_left_out_layer_by_layer(little_memory: None, tmp_path: Path) -> None:
    """2 bits in groups of 32 take 3 bits per weight, so 2.5 cannot be had with every expert."""
    model, texts = save_model(tmp_path / "model", layers=2, experts=4), save_texts(tmp_path / "texts")
    options = {"data": str(texts), "tasks": ("perplexity",), "bits": (2, 3), "group_sizes": (32,), "prune": True}
    result = compile_tiny(model, tmp_path / "out", "bits_per_weight", 2.5, quick=False, **options)
    quality = check_bundle(tmp_path / "out")
    assert result.plan.bits_per_weight <= 2.5 and quality["held_out_kl"]["perplexity"]["mean"] > 0
    assert any(open_bundle(tmp_path / "out").manifest.pruned_experts)


LOSS: dict[str, Any] = {"tasks": ("perplexity",), "bits": (2, 3, 4, 8), "group_sizes": (32,), "dense_bits": 8}


def test_a_loss_target_layer_by_layer(little_memory: None, tmp_path: Path) -> None:
    """Judged by bundles in the runtime; the baseline is that of the whole model in transformers."""
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts", validation=20)
    found = compile_tiny(model, tmp_path / "out", "loss", 0.03, quick=False, data=str(texts), **LOSS)
    quality = check_bundle(tmp_path / "out")
    task = quality["tasks"]["perplexity"]
    assert quality["verdict"] in ("supported", "met") and task["loss"]["loss"] <= 0.03 and task["n"] == 40
    assert task["kl"]["mean"] > 0 and not quality["held_out_kl"]
    judged = [trial for trial in quality["trials"] if trial["accepted"] is not None]
    assert any(trial["accepted"] for trial in judged)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "texts"], "no bundle of a trial"
    split = load_splits(str(texts), "perplexity")
    assert task["baseline"] == pytest.approx(
        evaluate(split.task, split.test.items, TransformersOracle(model)).value, rel=1e-3
    )
    assert found.plan.bits_per_weight < 16


def test_a_plan_alone_writes_nothing_and_leftovers_are_removed(little_memory: None, tmp_path: Path) -> None:
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    options = {"data": str(texts), **LOSS}
    planned = compile_tiny(model, tmp_path / "none" / "out", "loss", 0.2, quick=False, plan_only=True, **options)
    assert planned.path is None and sorted(path.name for path in tmp_path.iterdir()) == ["model", "texts"]
    left = tmp_path / "out.work-trial.partial"
    left.mkdir()
    (left / "dense.safetensors").write_bytes(b"of a killed compile")
    compile_tiny(model, tmp_path / "out", "uniform", 4, dense_bits=8)
    assert not left.exists()


def test_bundles_of_trials_never_take_the_place_of_anything(little_memory: None, tmp_path: Path) -> None:
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    own = tmp_path / "out.work-unquantized.partial"
    own.mkdir()
    (own / "letter.txt").write_text("mine")
    with pytest.raises(OptionError, match="is in the way and was not left by a compile"):
        compile_tiny(model, tmp_path / "out", "loss", 0.03, quick=False, data=str(texts), **LOSS)
    assert (own / "letter.txt").read_text() == "mine"


@pytest.mark.parametrize(("kind", "value"), [("size", 30_000), ("kl", 0.1), ("loss", 0.1)])
def test_memory_for_less_than_a_layer_says_what_would_do(tmp_path: Path, kind: TargetKind, value: float) -> None:
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    data = {"data": str(texts), "tasks": ("perplexity",)} if kind != "size" else {}
    with pytest.raises(OptionError, match="one layer at a time takes") as caught:
        compile_tiny(model, tmp_path / "out", kind, value, quick=False, dense_bits=8, memory_bytes=10**6, **data)
    assert "--memory" in str(caught.value.hint) and not (tmp_path / "out").exists()


SMALL: dict[str, Any] = {"tasks": ("perplexity",), "bits": (2, 4, 8), "group_sizes": (32,), "dense_bits": 8}


@pytest.mark.parametrize("memory", ["little", pytest.param("large", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{"search": "edgemoe"}, {"sensitivity": "exact"}, {"fallback_bits": 3}])
def test_every_search_goes_with_any_memory(
    options: dict[str, Any], memory: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """EdgeMoE's search, each expert measured alone, low versions in a format that is not searched."""
    if memory == "little":
        request.getfixturevalue("little_memory")
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts", validation=12)
    common = {name: value for name, value in SMALL.items() if name != "bits" or "search" not in options}
    kl = 5e-3 if "fallback_bits" in options else 0.2  # experts that are larger than their low versions
    result = compile_tiny(model, tmp_path / "out", "kl", kl, quick=False, data=str(texts), **common, **options)
    quality, manifest = check_bundle(tmp_path / "out"), open_bundle(tmp_path / "out").manifest
    if "search" in options:
        names = [row["name"] for row in quality["comparison"]["baselines"]]
        assert any(name.startswith("EdgeMoE") for name in names)
        by_expert: dict[ExpertKey, set[QuantSpec]] = {}
        for unit, spec in result.plan.units.items():
            by_expert.setdefault(ExpertKey(unit.layer, unit.expert), set()).add(spec)
        assert all(len(specs) == 1 for specs in by_expert.values())
    if "sensitivity" in options:
        assert quality["sensitivity"]["corrections"] != np.ones((2, 3)).tolist()
    if "fallback_bits" in options:
        assert {entry.down.bitwidth for entry in manifest.low_experts} == {3}


@pytest.mark.parametrize("memory", ["little", pytest.param("large", marks=pytest.mark.slow)])
def test_a_search_without_data_goes_with_any_memory(
    memory: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if memory == "little":
        request.getfixturevalue("little_memory")
    model = save_model(tmp_path / "model", layers=2, experts=3)
    options: dict[str, Any] = {"bits": (2, 4, 8), "group_sizes": (32,), "dense_bits": 8}
    result = compile_tiny(model, tmp_path / "out", "bits_per_weight", 4.5, quick=False, **options)
    check_bundle(tmp_path / "out")
    assert 3 < result.plan.bits_per_weight <= 4.5


def test_a_comparison_is_measured_with_little_memory_if_it_is_requested(little_memory: None, tmp_path: Path) -> None:
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts", validation=12)
    options = {"quick": False, "data": str(texts), **SMALL}
    compile_tiny(model, tmp_path / "without", "kl", 0.2, **options)
    compile_tiny(model, tmp_path / "with", "kl", 0.2, comparisons=True, **options)
    assert check_bundle(tmp_path / "without")["comparison"] is None
    assert [row["name"] for row in check_bundle(tmp_path / "with")["comparison"]["baselines"]] == [
        "best uniform", "EdgeMoE as published", "EdgeMoE with our quantizer"
    ]  # fmt: skip
