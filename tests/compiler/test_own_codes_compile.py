"""Whole compiles of quantized checkpoints: units that keep the checkpoint's own codes, and how that is said."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moec.cli.terminal.report import loss_table
from moec.compiler.checkpoint.checkpoint import open_checkpoint
from moec.compiler.families import lower
from moec.compiler.quantization.own_codes import held_units
from moec.compiler.request.options import Talk
from moec.manifests.model import UnitKey
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.model.dense_weights import BundleWeights
from tests.tiny_compile import check_bundle, compile_tiny, contents, little_memory

DAMAGED = UnitKey(1, 2, "up")
HELD = "24 of 24 expert projections are stored with codes that `q4g32s` holds exactly; they are taken as they are"


def kept(bundle: Path, source: Path) -> set[UnitKey]:
    """Return the units of a bundle whose weights are those of the checkpoint's parts, to the last bit."""
    checkpoint, weights = open_checkpoint(str(source)), BundleWeights(open_bundle(bundle))
    lowering, found = lower(checkpoint), set[UnitKey]()
    for unit, tensor in lowering.units.items():
        decoded = checkpoint.packed[tensor.name].decode(checkpoint.stored_parts(tensor.name))
        if np.array_equal(weights.unit(unit), decoded.numpy()):
            found.add(unit)
    return found


@pytest.fixture(scope="module")
def searched(
    quantized: Callable[[str], Path], texts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """A bundle of an int4 checkpoint for a strict target, and the notes of its compile."""
    output, notes = tmp_path_factory.mktemp("searched") / "out", list[str]()
    values: dict[str, Any] = {"data": str(texts), "talk": Talk(notes.append), "comparisons": True}
    compile_tiny(quantized("ct-int4"), output, "kl", 0.004, **values)
    return output, notes


def test_a_search_takes_the_codes_of_the_checkpoint(
    searched: tuple[Path, list[str]], quantized: Callable[[str], Path]
) -> None:
    output, notes = searched
    quality, source = check_bundle(output), quantized("ct-int4")
    assert HELD in notes
    formats = quality["bits"]["formats"]
    assert formats["q4g32s"] >= 18 and "bf16" not in formats
    assert len(kept(output, source)) == formats["q4g32s"]
    assert quality["own_codes"] == {"held": formats["q4g32s"], "of": 24}
    assert quality["sizes"]["expert_bits_per_weight"] <= 4.5
    uniform = next(row for row in quality["comparison"]["baselines"] if row["name"] == "best uniform")
    assert (
        uniform["bits_per_weight"] == 4.5 and uniform["expert_packed_bytes"] >= quality["sizes"]["expert_packed_bytes"]
    )


def test_the_certificate_names_its_baseline(searched: tuple[Path, list[str]]) -> None:
    quality = check_bundle(searched[0])
    assert loss_table(quality).endswith("baseline: the checkpoint's own weights, stored as compressed-tensors, 4 bits")
    card = (searched[0] / "README.md").read_text()
    assert "stores weights as compressed-tensors, 4 bits; what they decode to is the baseline" in card
    assert f"{quality['own_codes']['held']} of 24 expert projections keep the checkpoint's own codes" in card


def test_little_memory_gives_the_same_experts(
    searched: tuple[Path, list[str]],
    quantized: Callable[[str], Path],
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    little_memory(monkeypatch.setattr)
    values: dict[str, Any] = {"data": str(texts), "swaps": 0}
    compile_tiny(quantized("ct-int4"), tmp_path / "out", "bits_per_weight", 4.5, **values)
    assert len(kept(tmp_path / "out", quantized("ct-int4"))) == 24


@pytest.mark.parametrize("with_data", [False, True])
@pytest.mark.parametrize(
    ("layout", "bits", "spec"),
    [("ct-int4", 4, "q4g32s"), ("awq", 5, "q5g32s"), ("ct-int8", 8, "q8s"), ("ct-mxfp4", 4, "mxfp4")],
)
def test_uniform_bits_of_the_codes_keep_them(
    layout: str, bits: int, spec: str, with_data: bool, quantized: Callable[[str], Path], texts: Path, tmp_path: Path
) -> None:
    values, notes = {"data": str(texts)} if with_data else {}, list[str]()
    result = compile_tiny(quantized(layout), tmp_path / "out", "uniform", bits, talk=Talk(notes.append), **values)
    assert not any("rounded to nearest" in note for note in notes)
    assert result.quality["bits"]["formats"] == {spec: 24}
    assert len(kept(tmp_path / "out", quantized(layout))) == 24


def test_a_requested_group_keeps_the_codes_too(quantized: Callable[[str], Path], tmp_path: Path) -> None:
    """Groups of 32 with minima hold codes in groups of 32; one scale per row cannot."""
    source = quantized("ct-int4")
    for name, values, count in [
        ("minima", {"group_sizes": (32,), "symmetric": False}, 24),
        ("rows", {"group_sizes": (0,)}, 0),
    ]:
        result = compile_tiny(source, tmp_path / name, "uniform", 4, **values)
        assert len(kept(tmp_path / name, source)) == result.quality["own_codes"]["held"] == count


def test_bits_that_are_not_on_offer_are_named(quantized: Callable[[str], Path], tmp_path: Path) -> None:
    notes = list[str]()
    compile_tiny(quantized("awq"), tmp_path / "out", "bits_per_weight", 6, talk=Talk(notes.append))
    named = "`q5g32s` holds exactly, which is not on offer: add 5 to `--bits`"
    assert f"24 of 24 expert projections are stored with codes that {named}" in notes
    result = compile_tiny(quantized("awq"), tmp_path / "five", "bits_per_weight", 6, bits=(2, 4, 5, 16))
    assert result.quality["own_codes"]["held"] == len(kept(tmp_path / "five", quantized("awq"))) > 12


def test_a_quantizer_without_the_format_offers_others(quantized: Callable[[str], Path], tmp_path: Path) -> None:
    """optimum-quanto has no symmetric 4 bits, and groups of 64 are too wide for these codes."""
    pytest.importorskip("optimum.quanto")
    result = compile_tiny(quantized("ct-int4"), tmp_path / "out", "uniform", 4, quantizer="quanto")
    assert result.quality["bits"]["formats"] == {"q4g64": 24} and result.quality["own_codes"]["held"] == 0


@pytest.fixture
def damaged(quantized: Callable[[str], Path], tmp_path: Path) -> Path:
    """An int4 checkpoint with a scale that float16 cannot hold."""
    folder = Path(shutil.copytree(quantized("ct-int4"), tmp_path / "damaged"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight_scale"
    tensors[name] = tensors[name].clone()
    tensors[name][3, 1] = torch.tensor(2.0**-30, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("quantizer", ["gptq", "rtn"])
def test_a_unit_that_does_not_fit_is_quantized_as_ever(
    damaged: Path, texts: Path, quantizer: str, tmp_path: Path
) -> None:
    notes = list[str]()
    values: dict[str, Any] = {"data": str(texts), "quantizer": quantizer, "talk": Talk(notes.append)}
    result = compile_tiny(damaged, tmp_path / "out", "uniform", 4, **values)
    assert HELD.replace("24 of", "23 of") in notes
    assert result.quality["bits"]["formats"] == {"q4g32s": 24}
    assert result.quality["own_codes"] == {"held": 23, "of": 24}
    assert kept(tmp_path / "out", damaged) == set(lower(open_checkpoint(str(damaged))).units) - {DAMAGED}


def test_groups_that_differ_between_projections(quantized: Callable[[str], Path], tmp_path: Path) -> None:
    """Down projections in groups of 32, the others with one scale per row: the search is offered both formats."""
    folder = Path(shutil.copytree(quantized("ct-int4"), tmp_path / "mixed"))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_proj.weight_scale", "up_proj.weight_scale"))]:
        tensors[name] = tensors[name][:, :1].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert {str(s): n for s, n in held_units(lower(open_checkpoint(str(folder)))).items()} == {"q4g32s": 24, "q4s": 16}
    uniform = compile_tiny(folder, tmp_path / "uniform", "uniform", 4)
    searched = compile_tiny(folder, tmp_path / "searched", "bits_per_weight", 4.34)
    assert uniform.quality["bits"]["formats"] == {"q4g32s": 24}
    assert searched.quality["bits"]["formats"] == {"q4g32s": 8, "q4s": 16}
    for name in ("uniform", "searched"):
        assert len(kept(tmp_path / name, folder)) == 24


def test_equal_compiles_give_equal_bytes_killed_or_not(
    quantized: Callable[[str], Path], texts: Path, tmp_path: Path
) -> None:
    source, data = quantized("gptq-v2"), str(texts)
    compile_tiny(source, tmp_path / "whole", "uniform", 4, data=data)

    class Killed(BaseException):
        pass

    def stop(title: str) -> Callable[[int, int], None]:
        def report(done: int, total: int) -> None:
            if title == "calibrating and quantizing" and done == 1:
                raise Killed

        return report

    with pytest.raises(Killed):
        compile_tiny(source, tmp_path / "out", "uniform", 4, data=data, talk=Talk(progress=stop))
    notes = list[str]()
    values: dict[str, Any] = {"data": data, "resume": True, "talk": Talk(notes.append)}
    compile_tiny(source, tmp_path / "out", "uniform", 4, **values)
    assert any("taking up" in note for note in notes)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert len(kept(tmp_path / "out", source)) == 24
