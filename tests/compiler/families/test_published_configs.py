"""Configurations in the form of known checkpoints are accepted, and have as many weights as these are known to have.

Shapes and keys are those of each publisher, as far as public copies and counts of weights show them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from moec.compiler.checkpoint.checkpoint import Checkpoint
from moec.compiler.checkpoint.weight_files import TensorRef
from moec.compiler.families import Lowering, lower
from moec.manifests.errors import CheckpointError

PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())
NAMES = [entry["checkpoint"].rpartition("/")[2] for entry in PUBLISHED]
_CORRECTIONS = ("mlp.gate.e_score_correction_bias", "mlp.moe_statics.e_score_correction_bias")


class _WithoutWeights(Checkpoint):
    """A checkpoint whose only tensors are score corrections of zeros."""

    def tensor(self, name: str, index: int | None = None, rows: tuple[int, int] | None = None) -> torch.Tensor:
        return torch.zeros(self.tensors[name].shape)


def lowered(folder: Path, config: Mapping[str, Any]) -> Lowering:
    """Return the lowering of a config.json without weights, as if none were stored quantized."""
    config = {key: value for key, value in config.items() if key != "quantization_config" or value is None}
    (folder / "config.json").write_text(json.dumps(config))
    experts = config.get("n_routed_experts", config.get("moe_num_experts"))
    names = [f"model.layers.{at}.{name}" for at in range(config.get("num_hidden_layers", 0)) for name in _CORRECTIONS]
    tensors = {name: TensorRef("model.safetensors", "F32", (experts,), 0, 0) for name in names if experts}
    if config["model_type"] == "gpt_oss":  # as floats; MXFP4 has other names
        for name in (f"model.layers.{at}.mlp.experts.gate_up_proj" for at in range(config["num_hidden_layers"])):
            tensors[name] = TensorRef("model.safetensors", "BF16", (), 0, 0)
    return lower(_WithoutWeights(folder, "model", config, {}, tensors))


@pytest.mark.parametrize("entry", PUBLISHED, ids=NAMES)
def test_a_published_config_is_accepted_and_counted(entry: dict[str, Any], tmp_path: Path) -> None:
    model = lowered(tmp_path, entry["config"]).model
    units = sum(math.prod(model.unit_shape(unit.layer, unit.projection)) for unit in model.unit_keys())
    weights = units + sum(map(math.prod, model.dense_shapes().values()))
    assert weights / 1e9 == pytest.approx(entry["billion_weights"], rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {"unsloth_fixed": True, "unsloth_version": "2026.3.3"},
        {"_name_or_path": "/home/me/model", "quantization_config": None},
        {"shared_expert_intermediate_size": 0, "use_bias": False, "n_group": 1, "routed_scaling_factor": 1.0},
        {"some_future_key": None},
        {"hidden_dropout": 0.1, "pretraining_tp": 1, "num_nextn_predict_layers": 1},
    ],
)
def test_keys_without_effect_pass(changes: dict[str, Any], tmp_path: Path) -> None:
    lowered(tmp_path, {**PUBLISHED[NAMES.index("Mixtral-8x7B-v0.1")]["config"], **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_bias": True}, "key `qkv_bias`: expected `False`"),
        ({"shared_expert_intermediate_size": 512}, "key `shared_expert_intermediate_size`: expected `0`"),
        ({"use_qk_norm": True}, "key `use_qk_norm`: expected `False`"),
        ({"routed_scaling_factor": 2.5}, "key `routed_scaling_factor`: expected `1`"),
        ({"final_logit_softcapping": 30.0}, "key `final_logit_softcapping`: expected `None`"),
        ({"some_future_key": False}, "unknown: some_future_key"),
    ],
)
def test_keys_that_could_change_the_computation_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        lowered(tmp_path, {**PUBLISHED[NAMES.index("Mixtral-8x7B-v0.1")]["config"], **changes})


def test_norms_of_heads_that_are_switched_off_are_refused(tmp_path: Path) -> None:
    config = {**PUBLISHED[NAMES.index("Qwen3-30B-A3B")]["config"], "use_qk_norm": False}
    with pytest.raises(CheckpointError, match="key `use_qk_norm`: expected `True`"):
        lowered(tmp_path, config)
