"""The exported folder of every family: the checkpoint's own tensors, and the logits of the bundle in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from moec.cli.main import cli
from moec.manifests.model import ExpertKey
from moec.runtime import load
from tests.compiler.lowered import lowered, save_family
from tests.gates.bundles import emit_bundle
from tests.oracles.checkpoints import OWN_FAMILIES
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.tiny_models import save_tiny_mixtral

TOKENS = [1, 17, 40, 9, 33, 12, 25, 8, 30, 4, 21]


def export(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["export", *map(str, arguments)])


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    return found


@pytest.fixture(scope="module", params=[*TINY_FAMILIES, *OWN_FAMILIES, "switch"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(request.param, tmp_path_factory.mktemp("export") / "model")


def test_a_16_bit_bundle_gives_the_tensors_of_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    bundle, out = emit_bundle(folder, tmp_path / "bundle"), tmp_path / "out"
    lowering = lowered(folder)
    result = export(bundle, "-o", out, "--dtype", lowering.float_type)
    assert result.exit_code == 0, result.output
    original, found = tensors_of(folder), tensors_of(out)
    assert set(original) - set(found) <= lowering.ignored
    for name, tensor in found.items():
        assert tensor.shape == original[name].shape and torch.equal(tensor.float(), original[name].float()), name
    again = lowered(out)
    assert again.model == lowering.model and again.units.keys() == lowering.units.keys()


def test_transformers_computes_the_logits_of_the_bundle(folder: Path, tmp_path: Path) -> None:
    """Matrices of 2 bits. The runtime also rounds what they read to 8 bits, which is a small part of the difference.

    In random models this can turn a router, and later tokens read that, so the best quarter of the tokens counts.
    """
    lowering = lowered(folder)
    if lowering.model.encoder is not None or lowering.model.family in ("deepseek", "minicpm"):
        pytest.skip("no decoder of this family in transformers")
    bundle, out = emit_bundle(folder, tmp_path / "bundle", bitwidth=2, dense_bits=8), tmp_path / "out"
    assert export(bundle, "-o", out).exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected, before = (each(torch.tensor([TOKENS])).logits[0].numpy() for each in (model, plain))
    with load(bundle, expert_cache="100%", context=128) as engine:
        logits = engine.logits(TOKENS)
    own, quantized = (np.quantile(np.abs(found - expected).max(axis=1), 0.25) for found in (logits, before))
    assert own < 0.2 * quantized


def test_experts_that_are_left_out_have_a_bias_that_never_chooses_them(tmp_path: Path) -> None:
    name = next(name for name in TINY_FAMILIES if TINY_FAMILIES[name].name == "GptOss")
    folder = save_tiny_family(tmp_path / "model", TINY_FAMILIES[name])
    layers = lowered(folder).model.expert_layers
    bundle = emit_bundle(folder, tmp_path / "bundle", pruned=[ExpertKey(layers[0], 1), ExpertKey(layers[-1], 0)])
    assert export(bundle, "-o", tmp_path / "out").exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    with load(bundle, expert_cache="100%", context=128) as engine:
        logits = engine.logits(TOKENS)
    assert np.abs(logits - expected).max() <= 1e-3 * np.abs(expected).max()


def test_a_family_without_a_bias_cannot_leave_experts_out(tmp_path: Path) -> None:
    bundle = emit_bundle(save_tiny_mixtral(tmp_path / "model"), tmp_path / "bundle", pruned=[ExpertKey(0, 1)])
    result = export(bundle, "-o", tmp_path / "out")
    assert result.exit_code == 1 and "1 experts are left out" in result.output and "--keep-experts" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "model"]


def test_the_folder_has_index_tokenizer_and_a_plain_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.compiler.export.huggingface.SHARD_BYTES", 40_000)
    bundle, out = emit_bundle(save_tiny_mixtral(tmp_path / "model"), tmp_path / "bundle", bitwidth=4), tmp_path / "out"
    result = export(bundle, "-o", out, "--json")
    told: dict[str, Any] = json.loads(result.stdout)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    found = tensors_of(out)
    assert index["metadata"]["total_size"] == told["weight_bytes"] == sum(tensor.nbytes for tensor in found.values())
    assert set(index["weight_map"]) == set(found) and len(set(index["weight_map"].values())) > 2
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    assert AutoTokenizer.from_pretrained(out)("ab").input_ids == AutoTokenizer.from_pretrained(bundle)("ab").input_ids


def test_a_damaged_bundle_or_an_existing_folder_leaves_nothing(tmp_path: Path) -> None:
    bundle = emit_bundle(save_tiny_mixtral(tmp_path / "model"), tmp_path / "bundle", bitwidth=4)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for existing in (tmp_path / "full", bundle):
        result = export(bundle, "-o", existing)
        assert result.exit_code == 1 and "exists" in result.output and "remove it" in result.output
    (tmp_path / "out.partial").symlink_to(tmp_path / "full")
    result = export(bundle, "-o", tmp_path / "out")
    assert result.exit_code == 1 and "out.partial` is a link, expected a folder" in result.output
    (tmp_path / "out.partial").unlink()
    (tmp_path / "full").rename(tmp_path / "out.partial")
    result = export(bundle, "-o", tmp_path / "out")
    assert result.exit_code == 1 and "holds `mine`, which no export has left" in result.output
    (tmp_path / "out.partial").rename(tmp_path / "full")
    path = bundle / "experts-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    before = sorted(tmp_path.iterdir())
    result = export(bundle, "-o", tmp_path / "out")
    assert result.exit_code == 3 and "checksum" in result.output
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "full" / "mine").exists()


@pytest.mark.parametrize("options", [{"mixed": True}, {"bitwidth": 6}, {"bitwidth": 8, "low": "q2g32"}])
def test_every_file_of_a_bundle_opens_with_the_library(options: dict[str, Any], tmp_path: Path) -> None:
    bundle = emit_bundle(save_tiny_mixtral(tmp_path / "model"), tmp_path / "bundle", **options)
    manifest = json.loads((bundle / "moec.json").read_text())
    files = [entry["name"] for entry in manifest["files"] if entry["name"].endswith(".safetensors")]
    found = {name: tensors_of_file(bundle / name) for name in files}
    assert len(files) >= 4 and all(found.values())
    assert {weight["name"] for weight in manifest["dense"]} == set(found["dense.safetensors"])
    stored = sum(tensor.nbytes for tensor in found["dense.safetensors"].values())
    assert stored >= manifest["cost"]["dense_packed_bytes"]


def tensors_of_file(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
