"""Switch Transformers: names and settings of the checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moec.compiler.checkpoint.checkpoint import WEIGHTS_NAME
from moec.manifests.errors import CheckpointError
from moec.manifests.model import RelativeBiasSpec
from tests.compiler.lowered import configured, lowered
from tests.tiny_switch import TINY_SWITCHES, save_tiny_switch

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_switch(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture
def copy(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "copy"))


def test_the_model_is_what_the_configuration_says(tmp_path: Path) -> None:
    tiny = TINY_SWITCHES["switch-capacity"]
    lowering = lowered(save_tiny_switch(tmp_path / "model", tiny))
    model = lowering.model
    assert (model.family, model.num_layers, model.first_decoder_layer) == ("switch_transformers", 8, 3)
    assert model.expert_layers == (1, 3, 4, 5, 6, 7) and model.tie_embeddings and model.logits_scale == 64**-0.5
    routers = [model.layers[layer].experts.router for layer in model.expert_layers]
    assert [router.capacity for router in routers] == [6, 0, 0, 0, 0, 0]
    assert all(router.has_bias and not router.renormalize for router in routers)
    attention = model.layers[0].attention
    assert (attention.num_heads, attention.head_size, attention.score_scale) == (3, 32, 1.0)
    assert attention.relative_bias == RelativeBiasSpec(32, 128) and attention.rope is None
    assert model.max_positions == 512 and model.eos_token_ids == (2,)
    untied = lowered(save_tiny_switch(tmp_path / "untied", TINY_SWITCHES["switch-all-routed-half"])).model
    assert not untied.tie_embeddings and untied.logits_scale == 1.0 and untied.expert_layers == (0, 1, 2, 3, 4)


def test_units_are_the_tensors_on_disk(plain: Path) -> None:
    lowering, on_disk = lowered(plain), load_file(plain / WEIGHTS_NAME)
    places = {1: "encoder.block.1.layer.1", 3: "encoder.block.3.layer.1", 5: "decoder.block.1.layer.2"}
    places[7] = "decoder.block.3.layer.2"
    assert {key.layer for key in lowering.units} == set(places)
    for key in lowering.units:
        letter = {"up": "wi", "down": "wo"}[key.projection]
        name = f"{places[key.layer]}.mlp.experts.expert_{key.expert}.{letter}.weight"
        assert torch.equal(lowering.unit(key), on_disk[name])
    for name, shape in lowering.model.dense_shapes().items():
        assert lowering.dense_weight(name).shape == shape
    assert {source.name for source in (*lowering.dense.values(), *lowering.units.values())} == set(on_disk)


def test_older_checkpoints_hold_copies_of_the_embedding(plain: Path, copy: Path) -> None:
    """They also hold a table that no release of transformers reads. A copy that differs is refused."""
    tensors = load_file(plain / WEIGHTS_NAME)
    shared = tensors["shared.weight"]
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    copies = {name: shared.clone() for name in names}
    save_file({**tensors, **copies, unread: torch.ones(32, 4)}, copy / WEIGHTS_NAME)
    lowering = lowered(copy)
    assert lowering.model == lowered(plain).model and lowering.ignored == {*names, unread}
    save_file({**tensors, "encoder.embed_tokens.weight": shared + 1}, copy / WEIGHTS_NAME)
    with pytest.raises(CheckpointError, match=r"`encoder.embed_tokens.weight` .* differs from `shared.weight`"):
        lowered(copy)
    save_file({**tensors, "lm_head.weight": shared + 1}, copy / WEIGHTS_NAME)
    model = lowered(copy).model
    assert not model.tie_embeddings and model.logits_scale == 64**-0.5  # the key decides the scale, not the weights


def test_keys_of_older_configurations(copy: Path) -> None:
    before = lowered(copy).model
    older = {
        "n_positions": 77, "feed_forward_proj": "relu", "is_gated_act": False, "output_past": True,
        "batch_prioritized_routing": False, "router_type": "tokens_masked", "encoder_sparse_step": ...,
    }  # fmt: skip
    model = lowered(configured(copy, **older)).model
    assert model.max_positions == 77 and model.layers == before.layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense_act_fn": "gated-gelu"}, "key `dense_act_fn`"), ({"is_gated_act": True}, "key `is_gated_act`"),
        ({"feed_forward_proj": "gelu"}, "key `feed_forward_proj`"), ({"d_kv": 0}, "key `d_kv`"),
        ({"is_encoder_decoder": False}, "key `is_encoder_decoder`"), ({"mystery": 1}, "key `mystery`"),
        ({"encoder_sparse_step": 1}, "key `encoder_sparse_step`"), ({"num_experts": ...}, "key `num_experts`"),
        ({"decoder_sparse_step": 4}, "key `decoder_sparse_step`"), ({"expert_capacity": -1}, "key `expert_capacity`"),
        ({"num_sparse_decoder_layers": 5}, "key `num_sparse_decoder_layers`"),
        ({"num_decoder_layers": 1025}, "key `num_decoder_layers`"), ({"router_dtype": "float16"}, "key `router_dtype`"),
        ({"relative_attention_max_distance": 9}, "max_distance must exceed 16"),
        ({"tie_encoder_decoder": True}, "key `tie_encoder_decoder`"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_expressed_are_named(copy: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        lowered(configured(copy, **changes))


def test_a_start_token_is_needed(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match="key `decoder_start_token_id`"):
        lowered(configured(copy, decoder_start_token_id=...))
