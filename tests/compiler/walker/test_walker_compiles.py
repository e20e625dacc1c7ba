"""Whole compiles layer by layer, with every model treated as too large for memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moec.compiler.reference.model import ReferenceModel
from moec.compiler.request.targets import TargetKind
from moec.evaluation.data import load_splits
from moec.evaluation.run import evaluate
from moec.manifests.errors import OptionError
from moec.runtime.bundle.opening import open_bundle
from tests.tiny_compile import check_bundle, compile_tiny, contents, save_model, save_texts


@pytest.fixture
def too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every model as too large for memory."""
    monkeypatch.setattr("moec.compiler.walker.planning.goes_layer_by_layer", lambda *_: True)


def test_a_whole_compile_layer_by_layer(too_large: None, tmp_path: Path) -> None:
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


def test_a_kl_target_layer_by_layer(too_large: None, tmp_path: Path) -> None:
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


def test_experts_are_left_out_layer_by_layer(too_large: None, tmp_path: Path) -> None:
    """2 bits in groups of 32 take 3 bits per weight, so 2.5 is impossible with all experts."""
    model, texts = save_model(tmp_path / "model", layers=2, experts=4), save_texts(tmp_path / "texts")
    options = {"data": str(texts), "tasks": ("perplexity",), "bits": (2, 3), "group_sizes": (32,), "prune": True}
    result = compile_tiny(model, tmp_path / "out", "bits_per_weight", 2.5, quick=False, **options)
    quality = check_bundle(tmp_path / "out")
    assert result.plan.bits_per_weight <= 2.5 and quality["held_out_kl"]["perplexity"]["mean"] > 0
    assert any(open_bundle(tmp_path / "out").manifest.pruned_experts)


LOSS: dict[str, Any] = {"tasks": ("perplexity",), "bits": (2, 3, 4, 8), "group_sizes": (32,), "dense_bits": 8}


def test_a_loss_target_layer_by_layer(too_large: None, tmp_path: Path) -> None:
    """Bundles in the runtime decide. The baseline is that of the whole model in transformers."""
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
        evaluate(split.task, split.test.items, ReferenceModel(model)).value, rel=1e-3
    )
    assert found.plan.bits_per_weight < 16


def test_what_a_loss_needs_is_known_before_any_work(too_large: None, tmp_path: Path) -> None:
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    options = {"data": str(texts), **LOSS}
    with pytest.raises(OptionError, match="there is no folder"):
        compile_tiny(model, tmp_path / "none" / "out", "loss", 0.03, quick=False, plan_only=True, **options)
    with pytest.raises(OptionError, match="EdgeMoE's search holds the whole model"):
        compile_tiny(
            model, tmp_path / "out", "kl", 0.1, quick=False, search="edgemoe", data=str(texts), tasks=("perplexity",)
        )
    left = tmp_path / "out.work-trial.partial"
    left.mkdir()
    (left / "dense.safetensors").write_bytes(b"of a killed compile")
    compile_tiny(model, tmp_path / "out", "uniform", 4, dense_bits=8)
    assert not left.exists()


def test_bundles_of_trials_never_take_the_place_of_anything(too_large: None, tmp_path: Path) -> None:
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    own = tmp_path / "out.work-unquantized.partial"
    own.mkdir()
    (own / "letter.txt").write_text("mine")
    with pytest.raises(OptionError, match="is in the way and was not left by a compile"):
        compile_tiny(model, tmp_path / "out", "loss", 0.03, quick=False, data=str(texts), **LOSS)
    assert (own / "letter.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("kind", "with_data", "memory", "words"),
    [("size", False, 10**12, "--data"), ("kl", True, 10**6, "--memory"), ("loss", True, 10**6, "--memory")],
)
def test_what_cannot_go_layer_by_layer_says_what_would_do(
    too_large: None, tmp_path: Path, kind: TargetKind, with_data: bool, memory: int, words: str
) -> None:
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    data = {"data": str(texts), "tasks": ("perplexity",)} if with_data else {}
    with pytest.raises(OptionError) as caught:
        value = 30_000 if kind == "size" else 0.1
        compile_tiny(model, tmp_path / "out", kind, value, quick=False, dense_bits=8, memory_bytes=memory, **data)
    assert words in f"{caught.value} {caught.value.hint}" and not (tmp_path / "out").exists()
