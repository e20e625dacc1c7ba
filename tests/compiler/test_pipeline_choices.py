"""Compiles with other quantizers, with few formats, and with foreign files next to the output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.compiler.preflight.preparation import prepare
from moec.compiler.preflight.prepared import MemoryNeed
from moec.compiler.request.targets import TargetKind
from moec.compiler.walker.memory import LARGE_TEXTS, SMALL_TEXTS, TextLimits
from moec.manifests.errors import OptionError
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.engine.engine import Engine
from moec.runtime.options.runtime import RuntimeOptions
from tests.tiny_compile import check_bundle, compile_tiny, make_request, save_model

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_search_with_quanto_ends_in_a_bundle(model: Path, texts: Path, tmp_path: Path) -> None:
    result = compile_tiny(model, tmp_path / "out", "kl", 0.5, data=str(texts), quantizer="quanto", comparisons=True)
    assert result.path is not None
    manifest = json.loads((result.path / "moec.json").read_bytes())
    assert manifest["options"]["quantizer"] == "quanto"
    names = [row["name"] for row in result.quality["comparison"]["baselines"]]
    assert "EdgeMoE with our quantizer" in names


def test_memory_for_the_model_is_memory_for_both_bundles_of_the_certificate(
    model: Path, texts: Path, tmp_path: Path
) -> None:
    """Memory that holds the model certifies tasks for every target: the checkpoint answers next to the bundle."""

    def least(kind: TargetKind, limits: TextLimits, **data: Any) -> int:
        prepared = prepare(make_request(model, tmp_path / "out", kind, 4, **data))
        tasks = len(prepared.splits)
        return MemoryNeed(prepared.lowering.model, prepared.request.options, prepared.specs, 2, tasks).bytes_with(
            limits
        )

    data = {"data": str(texts), "tasks": ("perplexity",), "sensitivity": "proxy"}
    assert least("kl", LARGE_TEXTS, **data) == least("loss", LARGE_TEXTS, **data)
    assert least("kl", SMALL_TEXTS, **data) < least("loss", SMALL_TEXTS, **data)
    assert least("bits_per_weight", LARGE_TEXTS) < least("bits_per_weight", LARGE_TEXTS, **data)


def test_eight_bits_of_quanto_have_one_scale_a_row(model: Path, tmp_path: Path) -> None:
    result = compile_tiny(model, tmp_path / "out", "uniform", 8, quantizer="quanto")
    assert {str(spec) for spec in result.plan.units.values()} == {"q8"}


def test_what_an_unfinished_compile_did_not_leave_is_not_removed(model: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "thesis.txt").write_text("mine")
    with pytest.raises(OptionError, match="is in the way and was not left by a compile"):
        compile_tiny(model, tmp_path / "out", "uniform", 4)
    assert (partial / "thesis.txt").read_text() == "mine" and not (tmp_path / "out").exists()
    (partial / "thesis.txt").rename(partial / "dense.safetensors.writing")
    assert compile_tiny(model, tmp_path / "out", "uniform", 4).path == tmp_path / "out"


def test_a_loss_target_with_nothing_below_16_bits_on_offer(model: Path, texts: Path, tmp_path: Path) -> None:
    result = compile_tiny(
        model, tmp_path / "out", "loss", 0.02, data=str(texts), bits=(16,), dense_bits=16, comparisons=False
    )
    assert result.plan.bits_per_weight == 16


def test_a_uniform_bundle_names_the_quantizer_that_made_it(model: Path, tmp_path: Path) -> None:
    compile_tiny(model, tmp_path / "out", "uniform", 4)
    assert json.loads((tmp_path / "out" / "moec.json").read_bytes())["options"]["quantizer"] == "rtn"


def test_groups_of_32_at_4_bits_take_the_bytes_of_q4_0(model: Path, tmp_path: Path) -> None:
    compile_tiny(model, tmp_path / "out", "uniform", 4, group_sizes=(32,), dense_bits=4)
    manifest = open_bundle(tmp_path / "out").manifest
    assert manifest.cost.expert_bits_per_weight == 4.5 and manifest.options["symmetric"] == "true"
    assert {str(entry.gate) for entry in manifest.experts} == {"q4g32s"}
    assert {str(entry.spec) for entry in manifest.dense if entry.name == "embedding"} == {"q4g32s"}


def test_eight_bits_are_used_where_128_divides_no_width(texts: Path, tmp_path: Path) -> None:
    """Widths of 576 and 192: a search between 8 and 16 bits, and answers of its bundle."""
    odd = save_model(tmp_path / "odd", layers=1, experts=2, hidden_size=576, width=192)
    options: dict[str, Any] = {"bits": (4, 8, 16), "group_sizes": (), "dense_bits": 8, "swaps": 0, "comparisons": False}
    result = compile_tiny(odd, tmp_path / "out", "bits_per_weight", 7.0, quick=False, data=str(texts), **options)
    assert "q8g64" in {str(spec) for spec in result.plan.units.values()}
    assert not {spec.bitwidth for spec in result.plan.units.values()} & {16}
    check_bundle(tmp_path / "out")
    with Engine(open_bundle(tmp_path / "out"), RuntimeOptions()) as engine:
        assert np.isfinite(engine.logits([5, 6, 7])).all()
