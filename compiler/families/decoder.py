"""What decoders of the Llama shape share: rotary attention with grouped heads, RMS norms, routed SwiGLU experts.

A family hands in its ModelSpec and its names; weights may lie one tensor per projection, as on the hub, or stacked, as
transformers 5 holds them in memory.
Shapes: D hidden, F expert width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
    UnitKey,
)

from ..checkpoint import CONFIG_NAME, Checkpoint
from .lowering import Lowering, TensorSource, common_float_type
from .settings import Settings

LayerParts = tuple[AttentionSpec, ExpertsSpec]
MAX_EXPERTS_PER_LAYER = 4096  # bounds what a hostile config.json can make a family allocate
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_STACKED = "mlp"
_LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "output": "self_attn.o_proj.weight",
    "experts_norm": "post_attention_layernorm.weight",
}


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where a family keeps its experts on disk.

    block: the module of a layer that holds `gate` (the router) and `experts`. projections: gate, up, down -> name.
    """

    block: str
    projections: Mapping[str, str]


def attention_of(settings: Settings, **more: Any) -> AttentionSpec:
    """Attention with the plain rotary embedding over whole heads. more: further fields. Raises CheckpointError."""
    hidden, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
    head_size = _head_size(settings, hidden, heads)
    kv_heads = settings.optional_integer("num_key_value_heads") or heads
    return AttentionSpec(heads, kv_heads, head_size, RopeSpec(settings.rope_theta(), head_size), **more)


def _head_size(settings: Settings, hidden: int, heads: int) -> int:
    """`head_dim`, or the hidden size divided by the heads. Raises CheckpointError."""
    head_size = settings.optional_integer("head_dim")
    if head_size is not None:
        return head_size
    if hidden % heads:
        settings.fail("num_attention_heads", f"a divisor of hidden_size {hidden}, or a key `head_dim`")
    return hidden // heads


def lower_family(
    checkpoint: Checkpoint, family: str, names: ExpertNames, parts: Callable[[Settings], LayerParts]
) -> Lowering:
    """Translate a checkpoint whose layers are all alike. parts: reads what is the family's own.

    Raises CheckpointError naming the key of config.json that stands against it.
    """
    settings = Settings(checkpoint)
    try:
        model = _model_spec(checkpoint, settings, family, *parts(settings))
    except ValueError as error:
        raise CheckpointError(f"`{checkpoint.root / CONFIG_NAME}` contradicts itself: {error}", "repair it") from error
    settings.finish()
    return _lower_decoder(checkpoint, model, names)


def _model_spec(
    checkpoint: Checkpoint, settings: Settings, family: str, attention: AttentionSpec, experts: ExpertsSpec
) -> ModelSpec:
    """A ModelSpec whose layers are all alike. Raises CheckpointError, ValueError on a contradiction."""
    settings.one_of("hidden_act", ("silu",))
    tie = settings.boolean("tie_word_embeddings", False) and not _head_differs(checkpoint)
    return ModelSpec(
        family=family,
        hidden_size=settings.integer("hidden_size"),
        vocab_size=settings.integer("vocab_size"),
        max_positions=settings.integer("max_position_embeddings"),
        norm_eps=settings.number("rms_norm_eps"),
        tie_embeddings=tie,
        layers=(LayerSpec(attention, experts),) * settings.integer("num_hidden_layers", MAX_LAYERS),
        eos_token_ids=settings.eos_token_ids(),
    )


def _lower_decoder(checkpoint: Checkpoint, model: ModelSpec, names: ExpertNames) -> Lowering:
    """Find every weight of the model. Raises CheckpointError where 16-bit types are mixed."""
    dense = _dense(checkpoint, model, names)
    units = {
        key: source for layer in range(model.num_layers) for key, source in _units(checkpoint, model, names, layer)
    }
    read = [source.name for source in (*dense.values(), *units.values())]
    float_type, notes = common_float_type(checkpoint, read)
    ignored = {name for name in checkpoint.tensors if name.endswith(".rotary_emb.inv_freq")}
    if model.tie_embeddings:
        ignored.add(_HEAD)
    return Lowering(checkpoint, model, dense, units, frozenset(ignored), float_type, notes)


def _head_differs(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint said to be tied holds another output matrix; transformers then does not tie them."""
    if _HEAD not in checkpoint.tensors or _EMBEDDING not in checkpoint.tensors:
        return False
    return not torch.equal(checkpoint.tensor(_HEAD), checkpoint.tensor(_EMBEDDING))


def _dense(checkpoint: Checkpoint, model: ModelSpec, names: ExpertNames) -> dict[str, TensorSource]:
    """Sources of everything that is not a routed expert, in the order of ModelSpec.dense_shapes."""
    found = {"embedding": _EMBEDDING, "final_norm": "model.norm.weight", "lm_head": _HEAD}
    for layer in range(model.num_layers):
        for name, on_disk in _LAYER_NAMES.items():
            found[f"layers.{layer}.{name}"] = f"model.layers.{layer}.{on_disk}"
        stacked = f"model.layers.{layer}.{_STACKED}.gate.weight"
        on_disk = stacked if stacked in checkpoint.tensors else f"model.layers.{layer}.{names.block}.gate.weight"
        found[f"layers.{layer}.router"] = on_disk
    return {name: TensorSource(found[name], shape) for name, shape in model.dense_shapes().items()}


def _units(
    checkpoint: Checkpoint, model: ModelSpec, names: ExpertNames, layer: int
) -> list[tuple[UnitKey, TensorSource]]:
    """Sources of the routed experts of one layer."""
    count = model.layers[layer].experts.count
    stacked = f"model.layers.{layer}.{_STACKED}.experts."
    sources = []
    for expert in range(count):
        for projection in PROJECTIONS:
            rows, columns = model.unit_shape(layer, projection)
            if stacked + "gate_up_proj" not in checkpoint.tensors:
                own = f"model.layers.{layer}.{names.block}.experts.{expert}.{names.projections[projection]}.weight"
                source = TensorSource(own, (rows, columns))
            elif projection == "down":
                source = TensorSource(stacked + "down_proj", (count, rows, columns), expert)
            else:
                start = 0 if projection == "gate" else rows
                shape = (count, 2 * rows, columns)
                source = TensorSource(stacked + "gate_up_proj", shape, expert, (start, start + rows))
            sources.append((UnitKey(layer, expert, projection), source))
    return sources
