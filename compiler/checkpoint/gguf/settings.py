"""The settings of a GGUF file as config.json has them. Keys are those of llama.cpp (gguf, constants.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moec.manifests.errors import CheckpointError

from .header import GgufHead

_SIGMOID = 2
"""Value of `expert_gating_func`."""


class Metadata:
    """Typed access to the metadata of a file. Raises CheckpointError, which names the key."""

    def __init__(self, head: GgufHead) -> None:
        self._head = head
        self.architecture = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._head.metadata

    def text(self, key: str) -> str:
        """Return a text by its whole key."""
        return str(self._typed(key, self._head.metadata.get(key), str))

    def get(self, key: str, absent: Any = None) -> Any:
        """Return a value of the architecture, or `absent`."""
        return self._head.metadata.get(f"{self.architecture}.{key}", absent)

    def integer(self, key: str, absent: int | None = None) -> int:
        """Return a whole number that is not negative."""
        value = self._typed(f"{self.architecture}.{key}", self.get(key, absent), int)
        if value < 0:
            self._fail(f"{self.architecture}.{key}", "a number of 0 or more", value)
        return int(value)

    def number(self, key: str, absent: float | None = None) -> float:
        """Return a number. Files hold single precision, so that its shortest decimal form is the one meant."""
        value = self.get(key, absent)
        if type(value) is int:
            return float(value)
        return shortest(self._typed(f"{self.architecture}.{key}", value, float))

    def of_layers(self, key: str, layers: int) -> list[int]:
        """Return a whole number for each layer, also if one stands for all."""
        value = self.get(key)
        values = value if isinstance(value, list) else [value] * layers
        if len(values) < layers or not all(type(each) is int and each >= 0 for each in values):
            self._fail(f"{self.architecture}.{key}", f"a whole number, or {layers} of them", value)
        return values[:layers]

    def _typed(self, key: str, value: Any, kind: type) -> Any:
        if type(value) is not kind:
            self._fail(key, f"a value of type {kind.__name__}", value)
        return value

    def _fail(self, key: str, expected: str, value: Any) -> None:
        found = "nothing" if value is None else f"`{str(value)[:80]}`"
        raise CheckpointError(
            f"`{self._head.path}`: key `{key}`: expected {expected}, found {found}",
            "convert the model again with a current llama.cpp",
        )


def shortest(value: float) -> float:
    """Return the number of fewest digits that single precision rounds to the same value, 9.99999974e-06 -> 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))


def config_of(head: GgufHead) -> dict[str, Any]:
    """Return the settings of a file. Raises CheckpointError if its architecture is not read."""
    metadata = Metadata(head)
    if metadata.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"`{head.path}` has the architecture `{metadata.architecture[:80]}`, expected one of "
            f"{', '.join(f'`{name}`' for name in sorted(ARCHITECTURES))}",
            "compile the model's Hugging Face folder",
        )
    embedding = head.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"`{head.path}` has no matrix `token_embd.weight`", "copy the file again")
    for key, plain in (("rope.scaling.type", "none"), ("attention.sliding_window", 0)):
        if metadata.get(key, plain) != plain:
            found = f"`{metadata.architecture}.{key}` {str(metadata.get(key))[:80]}"
            raise CheckpointError(
                f"`{head.path}` has {found}, which is not read yet", "compile the model's Hugging Face folder"
            )
    return ARCHITECTURES[metadata.architecture](metadata, head, _common(metadata, head, embedding.shape[0]))


def _common(metadata: Metadata, head: GgufHead, vocabulary: int) -> dict[str, Any]:
    """Return the settings that all architectures have."""
    layers = metadata.integer("block_count") - metadata.integer("nextn_predict_layers", 0)
    heads = max(metadata.of_layers("attention.head_count", layers), default=0)
    kv_heads = max(metadata.of_layers("attention.head_count_kv", layers), default=0) if _has_kv(metadata) else heads
    found = {
        "vocab_size": vocabulary,
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": metadata.integer("context_length"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in head.tensors,
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }
    if "attention.layer_norm_rms_epsilon" in metadata:
        found["rms_norm_eps"] = metadata.number("attention.layer_norm_rms_epsilon")
    if "attention.key_length" in metadata:
        found["head_dim"] = metadata.integer("attention.key_length")
    return found


def _has_kv(metadata: Metadata) -> bool:
    return "attention.head_count_kv" in metadata


def _olmoe(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    experts = {"num_experts": metadata.integer("expert_count"), "norm_topk_prob": False}
    return {
        "model_type": "olmoe",
        **common,
        **experts,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "hidden_act": "silu",
    }


def _mixtral(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "mixtral",
        **common,
        "num_local_experts": metadata.integer("expert_count"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "hidden_act": "silu",
        "sliding_window": None,
    }


def _qwen_experts(metadata: Metadata) -> dict[str, Any]:
    width = metadata.integer("feed_forward_length")
    return {
        "num_experts": metadata.integer("expert_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length", width),
        "intermediate_size": width,
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


def _qwen2(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    shared = metadata.integer("expert_shared_feed_forward_length")
    more = {"shared_expert_intermediate_size": shared, "norm_topk_prob": False}
    return {"model_type": "qwen2_moe", **common, **_qwen_experts(metadata), **more}


def _qwen3(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "qwen3_moe", **common, **_qwen_experts(metadata), "norm_topk_prob": True}


def _lfm2(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    layers = common["num_hidden_layers"]
    kv_heads = metadata.of_layers("attention.head_count_kv", layers)
    has_corrections = any(name.endswith("exp_probs_b.bias") for name in head.tensors)
    return {
        "model_type": "lfm2_moe",
        **{key: value for key, value in common.items() if key not in ("rms_norm_eps", "tie_word_embeddings")},
        "tie_embedding": common["tie_word_embeddings"],
        "norm_eps": common["rms_norm_eps"],
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_experts": metadata.integer("expert_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "num_dense_layers": metadata.integer("leading_dense_block_count"),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "conv_bias": False,
        "norm_topk_prob": True,
        "use_expert_bias": has_corrections,
    }


def _corrected(metadata: Metadata) -> dict[str, Any]:
    """Return the settings of experts that DeepSeek's family tree shares."""
    return {
        "n_routed_experts": metadata.integer("expert_count"),
        "n_shared_experts": metadata.integer("expert_shared_count", 0),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", False)),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
        "hidden_act": "silu",
    }


def _glm4(metadata: Metadata, head: GgufHead, common: dict[str, Any]) -> dict[str, Any]:
    share = metadata.integer("rope.dimension_count") / common["head_dim"]
    return {
        "model_type": "glm4_moe",
        **common,
        **_corrected(metadata),
        "partial_rotary_factor": share,
        "attention_bias": "blk.0.attn_q.bias" in head.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in head.tensors,
    }


ARCHITECTURES: Mapping[str, Callable[[Metadata, GgufHead, dict[str, Any]], dict[str, Any]]] = {
    "glm4moe": _glm4,
    "lfm2moe": _lfm2,
    "llama": _mixtral,
    "olmoe": _olmoe,
    "qwen2moe": _qwen2,
    "qwen3moe": _qwen3,
}
"""Functions that return the settings, by architecture."""
