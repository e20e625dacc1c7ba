"""A checkpoint that also reads pictures is compiled as its text part, by the names of the published files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from moec.cli.main import cli
from moec.compiler.checkpoint.opening import open_checkpoint
from moec.manifests.errors import CheckpointError
from moec.runtime import load
from tests.compiler.lowered import lowered
from tests.gates.bundles import emit_bundle
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.tiny_models import VOCABULARY

PICTURES = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}


def with_pictures(folder: Path) -> Path:
    """Wrap a tiny text model in a model that also reads pictures, with random weights of the other part."""
    save_tiny_family(folder, TINY_FAMILIES["qwen3.5"])
    text = json.loads((folder / "config.json").read_text())
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=PICTURES)
    model = transformers.Qwen3_5MoeForConditionalGeneration(config).to(torch.bfloat16)
    own = {name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: weight
           for name, weight in load_file(folder / "model.safetensors").items()}  # fmt: skip
    pictures = {name: weight.data for name, weight in model.named_parameters() if ".visual." in name}
    save_file({**own, **pictures}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "dtype": "bfloat16"}))
    return folder


def test_its_text_part_computes_what_transformers_computes(tmp_path: Path) -> None:
    folder = with_pictures(tmp_path / "model")
    opened = open_checkpoint(str(folder))
    assert opened.config["model_type"] == "qwen3_5_moe_text"
    (note,) = opened.notes
    assert "only the text part is compiled" in note and "`model.visual`" in note
    tokens = np.random.default_rng(7).integers(4, VOCABULARY, 40).tolist()
    reference = transformers.Qwen3_5MoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].numpy()
    with load(emit_bundle(folder, tmp_path / "bundle"), expert_cache="100%", context=64) as engine:
        found = engine.logits(tokens)
    assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()


def test_its_bundle_is_exported_as_a_text_model(tmp_path: Path) -> None:
    folder, out = with_pictures(tmp_path / "model"), tmp_path / "out"
    bundle = emit_bundle(folder, tmp_path / "bundle")
    result = CliRunner().invoke(cli, ["export", str(bundle), "-o", str(out)])
    assert result.exit_code == 0, result.output
    tokens = torch.tensor([[1, 17, 40, 9, 33]])
    reference = transformers.Qwen3_5MoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    exported = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.allclose(exported(tokens).logits, reference(tokens).logits, atol=1e-4)


def test_a_text_model_of_an_unknown_kind_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = with_pictures(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["model_type"] = "qwen9_text"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="model family `qwen9_text` is unknown"):
        lowered(folder)
