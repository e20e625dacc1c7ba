"""Mixtral: grouped-query attention with rotary embeddings, softmax router over all experts, top-k renormalised.

Reads the names on disk (one tensor per projection) and the stacked names that transformers 5 uses in memory.
Shapes: D hidden, F expert width, E experts.
Source: transformers, models/mixtral/modeling_mixtral.py and conversion_mapping.py.
"""

from __future__ import annotations

import torch

from moec.manifests.errors import CheckpointError
from moec.manifests.model import (
    MAX_LAYERS,
    PROJECTIONS,
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
    RouterSpec,
    UnitKey,
)

from ..checkpoint import CONFIG_NAME, Checkpoint
from .lowering import Lowering, TensorSource, common_float_type
from .settings import Settings

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_MAX_EXPERTS_PER_LAYER = 4096  # bounds what a hostile config.json can make this module allocate
_LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "experts_norm": "post_attention_layernorm.weight",
}
_DISK_PROJECTIONS = {"gate": "w1", "up": "w3", "down": "w2"}


def lower(checkpoint: Checkpoint) -> Lowering:
    """Translate a Mixtral checkpoint. Raises CheckpointError naming the key of config.json that stands against it."""
    model = _model(checkpoint)
    dense = _dense(checkpoint, model)
    units = {key: source for index in range(model.num_layers) for key, source in _units(checkpoint, model, index)}
    names = [source.name for source in (*dense.values(), *units.values())]
    float_type, notes = common_float_type(checkpoint, names)
    ignored = {name for name in checkpoint.tensors if name.endswith(".rotary_emb.inv_freq")}
    if model.tie_embeddings:
        ignored.add(_HEAD)
    return Lowering(checkpoint, model, dense, units, frozenset(ignored), float_type, notes)


def _model(checkpoint: Checkpoint) -> ModelSpec:
    """config.json as a ModelSpec."""
    settings = Settings(checkpoint)
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    head_size = settings.optional_integer("head_dim")
    if head_size is None:
        if hidden % heads:
            settings.fail("num_attention_heads", f"a divisor of hidden_size {hidden}, or a key `head_dim`")
        head_size = hidden // heads
    theta = settings.rope_theta()
    tie = settings.boolean("tie_word_embeddings", False) and not _head_differs(checkpoint)
    try:
        attention = AttentionSpec(
            num_heads=heads,
            num_kv_heads=settings.optional_integer("num_key_value_heads") or heads,
            head_size=head_size,
            rope=RopeSpec(theta, head_size),
            sliding_window=settings.optional_integer("sliding_window") or 0,
        )
        settings.one_of("hidden_act", ("silu",))
        experts = ExpertsSpec(
            count=settings.integer("num_local_experts", _MAX_EXPERTS_PER_LAYER),
            top_k=settings.integer("num_experts_per_tok"),
            width=settings.integer("intermediate_size"),
            activation="silu",
            router=RouterSpec("softmax", renormalize=True),
        )
        model = ModelSpec(
            family="mixtral",
            hidden_size=hidden,
            vocab_size=settings.integer("vocab_size"),
            max_positions=settings.integer("max_position_embeddings"),
            norm_eps=settings.number("rms_norm_eps"),
            tie_embeddings=tie,
            layers=(LayerSpec(attention, experts),) * settings.integer("num_hidden_layers", MAX_LAYERS),
            eos_token_ids=settings.eos_token_ids(),
        )
    except ValueError as error:
        raise CheckpointError(f"`{checkpoint.root / CONFIG_NAME}` contradicts itself: {error}", "repair it") from error
    settings.finish()
    return model


def _head_differs(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint said to be tied holds another output matrix; transformers then does not tie them."""
    if _HEAD not in checkpoint.tensors or _EMBEDDING not in checkpoint.tensors:
        return False
    return not torch.equal(checkpoint.tensor(_HEAD), checkpoint.tensor(_EMBEDDING))


def _dense(checkpoint: Checkpoint, model: ModelSpec) -> dict[str, TensorSource]:
    """Sources of everything that is not a routed expert, in the order of ModelSpec.dense_shapes."""
    names = {"embedding": _EMBEDDING, "final_norm": "model.norm.weight", "lm_head": _HEAD}
    for index in range(model.num_layers):
        for name, on_disk in _LAYER_NAMES.items():
            names[f"layers.{index}.{name}"] = f"model.layers.{index}.{on_disk}"
        disk, stacked = (f"model.layers.{index}.{block}.gate.weight" for block in ("block_sparse_moe", "mlp"))
        names[f"layers.{index}.router"] = stacked if stacked in checkpoint.tensors else disk
    return {name: TensorSource(names[name], shape) for name, shape in model.dense_shapes().items()}


def _units(checkpoint: Checkpoint, model: ModelSpec, index: int) -> list[tuple[UnitKey, TensorSource]]:
    """Sources of the routed experts of one layer."""
    experts = model.layers[index].experts
    stacked = f"model.layers.{index}.mlp.experts."
    sources = []
    for expert in range(experts.count):
        for projection in PROJECTIONS:
            rows, columns = model.unit_shape(index, projection)
            if stacked + "gate_up_proj" not in checkpoint.tensors:
                name = f"model.layers.{index}.block_sparse_moe.experts.{expert}.{_DISK_PROJECTIONS[projection]}.weight"
                source = TensorSource(name, (rows, columns))
            elif projection == "down":
                source = TensorSource(stacked + "down_proj", (experts.count, rows, columns), expert)
            else:
                start = 0 if projection == "gate" else rows
                shape = (experts.count, 2 * rows, columns)
                source = TensorSource(stacked + "gate_up_proj", shape, expert, (start, start + rows))
            sources.append((UnitKey(index, expert, projection), source))
    return sources
