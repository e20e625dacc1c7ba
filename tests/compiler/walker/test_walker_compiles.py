"""Whole compiles whose memory holds one layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moec.evaluation.data import load_splits
from moec.evaluation.run import evaluate
from moec.runtime.bundle.open_bundle import open_bundle
from tests.tiny_compile import check_bundle, compile_tiny, contents, save_model, save_texts
from tests.transformers_oracle import TransformersOracle

pytestmark = pytest.mark.usefixtures("one_layer")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("walked") / "model", layers=2, experts=3)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_texts(tmp_path_factory.mktemp("walked") / "texts", validation=16)


def test_a_whole_compile_layer_by_layer(model: Path, texts: Path, tmp_path: Path) -> None:
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


LOSS: dict[str, Any] = {"tasks": ("perplexity",), "bits": (2, 3, 4, 8), "group_sizes": (32,), "dense_bits": 8}


def test_a_loss_target_layer_by_layer(model: Path, texts: Path, tmp_path: Path) -> None:
    """Judged by bundles in the runtime; the baseline is that of the whole model in transformers."""
    found = compile_tiny(model, tmp_path / "out", "loss", 0.03, quick=False, data=str(texts), **LOSS)
    quality = check_bundle(tmp_path / "out")
    task = quality["tasks"]["perplexity"]
    assert quality["verdict"] in ("supported", "met") and task["loss"]["loss"] <= 0.03 and task["n"] == 40
    assert task["kl"]["mean"] > 0 and not quality["held_out_kl"]
    judged = [trial for trial in quality["trials"] if trial["accepted"] is not None]
    assert any(trial["accepted"] for trial in judged)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "no bundle of a trial"
    split = load_splits(str(texts), "perplexity")
    assert task["baseline"] == pytest.approx(
        evaluate(split.task, split.test.items, TransformersOracle(model)).value, rel=1e-3
    )
    assert found.plan.bits_per_weight < 16


SMALL: dict[str, Any] = {"tasks": ("perplexity",), "bits": (2, 4, 8), "group_sizes": (32,), "dense_bits": 8}


def test_low_versions_come_in_a_format_that_is_not_searched(model: Path, texts: Path, tmp_path: Path) -> None:
    """The KL asks for experts that are larger than their low versions."""
    options = {"quick": False, "data": str(texts), **SMALL}
    compile_tiny(model, tmp_path / "out", "kl", 5e-3, fallback_bits=3, **options)
    check_bundle(tmp_path / "out")
    assert {entry.down.bitwidth for entry in open_bundle(tmp_path / "out").manifest.low_experts} == {3}


def test_a_search_without_data_goes_with_little_memory(model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"bits": (2, 4, 8), "group_sizes": (32,), "dense_bits": 8}
    result = compile_tiny(model, tmp_path / "out", "bits_per_weight", 4.5, quick=False, **options)
    check_bundle(tmp_path / "out")
    assert 3 < result.plan.bits_per_weight <= 4.5


def test_a_requested_comparison_is_measured_with_little_memory(model: Path, texts: Path, tmp_path: Path) -> None:
    options = {"quick": False, "data": str(texts), "sensitivity": "exact", **SMALL}
    compile_tiny(model, tmp_path / "without", "kl", 0.2, **options)
    compile_tiny(model, tmp_path / "with", "kl", 0.2, comparisons=True, **options)
    assert check_bundle(tmp_path / "without")["comparison"] is None
    assert [row["name"] for row in check_bundle(tmp_path / "with")["comparison"]["baselines"]] == [
        "best uniform", "EdgeMoE as published", "EdgeMoE with our quantizer"
    ]  # fmt: skip
