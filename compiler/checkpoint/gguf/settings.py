"""The settings of a GGUF file as config.json has them."""

from __future__ import annotations

from typing import Any

from moec.manifests.errors import CheckpointError
from moec.manifests.model import MAX_LAYERS

from .architectures import ARCHITECTURES
from .header import GgufHead
from .metadata import Metadata

_WINDOWED = ("afmoe", "exaone-moe", "gemma4", "gpt-oss", "laguna", "mellum")
"""Architectures whose windows are read."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.temperature_scale": (0.0,),
    "rope.scaling.type": ("none", "linear", "yarn"),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
}
"""Values of keys with which a model computes the same as without them, or that are read."""


def config_of(head: GgufHead) -> dict[str, Any]:
    """Return the settings of a file. Raises CheckpointError if its architecture is not read."""
    metadata = Metadata(head)
    if metadata.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"`{head.path}` has the architecture `{metadata.architecture[:80]}`, expected one of "
            f"{', '.join(f'`{name}`' for name in sorted(ARCHITECTURES))}",
            "compile the model's Hugging Face folder",
        )
    if not metadata.integer("expert_count", 0):
        raise CheckpointError(
            f"`{head.path}` is a dense model: it has no experts, and moec brings it nothing", "use llama.cpp for it"
        )
    embedding = head.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"`{head.path}` has no matrix `token_embd.weight`", "copy the file again")
    neutral = dict(_NEUTRAL)
    if metadata.architecture not in _WINDOWED:
        neutral["attention.sliding_window"] = (0,)
    for key, values in neutral.items():
        if metadata.get(key, values[0]) not in values:
            found = f"`{metadata.architecture}.{key}` {str(metadata.get(key))[:80]}"
            raise CheckpointError(
                f"`{head.path}` has {found}, which is not read yet", "compile the model's Hugging Face folder"
            )
    return ARCHITECTURES[metadata.architecture](metadata, head, _common(metadata, head, embedding.shape[0]))


def _common(metadata: Metadata, head: GgufHead, vocabulary: int) -> dict[str, Any]:
    """Return the settings that all architectures have."""
    layers = metadata.positive("block_count", most=MAX_LAYERS) - metadata.integer("nextn_predict_layers", 0)
    if layers < 1:
        raise CheckpointError(f"`{head.path}` has only layers for drafts", "convert the whole model")
    heads = max(metadata.of_layers("attention.head_count", layers))
    hidden = metadata.positive("embedding_length")
    has_kv = "attention.head_count_kv" in metadata
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(metadata.of_layers("attention.head_count_kv", layers)) if has_kv else heads,
        "head_dim": metadata.positive("attention.key_length", hidden // max(heads, 1)),
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in head.tensors,
        "num_experts_per_tok": metadata.positive("expert_used_count"),
        **_scaling(metadata),
    }


def _scaling(metadata: Metadata) -> dict[str, Any]:
    """Return how the rotary embedding is stretched. A factor without a type stretches all frequencies alike."""
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 0.0))
    kind = metadata.get("rope.scaling.type", "linear" if factor not in (0.0, 1.0) else "none")
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.integer("rope.scaling.original_context_length")
        for key in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{key}" in metadata:
                scaling[key] = metadata.number(f"rope.scaling.yarn_{key}")
    return {"rope_scaling": scaling}
