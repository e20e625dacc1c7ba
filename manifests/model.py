"""ModelSpec: what the runtime executes, free of any checkpoint's names.

Shape letters: D hidden, F expert width, E experts, K top-k, H heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

PROJECTIONS = ("gate", "up", "down")
MAX_LAYERS = 1024
MAX_EXPERTS = 65535
MAX_POSITIONS = 1 << 28


class ExpertKey(NamedTuple):
    """One routed expert: its decoder layer (counted over all layers) and its index in that layer."""

    layer: int
    expert: int


class UnitKey(NamedTuple):
    """The unit of the search: one projection of one expert."""

    layer: int
    expert: int
    projection: str


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding over the first `rotary_size` of each head, halves rotated against each other."""

    theta: float
    rotary_size: int

    def __post_init__(self) -> None:
        _require(1 <= self.theta <= 1e15, f"rope theta must be 1 to 1e15, found {self.theta}")
        _require(0 < self.rotary_size <= 4096 and self.rotary_size % 2 == 0, "rotary_size must be even, 2 to 4096")


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal attention with grouped key/value heads; sliding_window 0 means the whole context.

    query_key_norm: `full` norms queries and keys over all their heads together, `head` each head by itself, both before
    the rotary embedding.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: RopeSpec
    sliding_window: int = 0
    query_key_norm: Literal["none", "full", "head"] = "none"

    def __post_init__(self) -> None:
        _require(0 < self.num_heads <= 4096 and 0 < self.head_size <= 4096, "heads and head_size must be 1 to 4096")
        _require(
            0 < self.num_kv_heads <= self.num_heads and self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}",
        )
        _require(0 <= self.sliding_window <= MAX_POSITIONS, f"sliding_window out of range: {self.sliding_window}")
        _require(self.rope.rotary_size <= self.head_size, "rotary_size must not exceed head_size")


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How router logits become experts and weights: scoring over all experts, top-k, then renormalised or not."""

    scoring: Literal["softmax"]
    renormalize: bool


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The routed experts of one layer: down(act(gate x) * (up x)) each."""

    count: int
    top_k: int
    width: int
    activation: Literal["silu"]
    router: RouterSpec

    def __post_init__(self) -> None:
        _require(0 < self.count <= MAX_EXPERTS, f"expert count must be 1 to {MAX_EXPERTS}, found {self.count}")
        _require(0 < self.top_k <= self.count, f"top_k must be 1 to {self.count}, found {self.top_k}")
        _require(0 < self.width <= 1 << 20, f"expert width out of range: {self.width}")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: norm, attention, residual; norm, routed experts, residual."""

    attention: AttentionSpec
    experts: ExpertsSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only mixture of experts.

    norm_eps: of every RMS norm. max_positions: the longest context the checkpoint was made for.
    eos_token_ids end a generation. Raises ValueError when fields contradict each other.
    """

    family: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tie_embeddings: bool
    layers: tuple[LayerSpec, ...]
    eos_token_ids: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        _require(0 < self.hidden_size <= 1 << 20, f"hidden_size out of range: {self.hidden_size}")
        _require(0 < self.vocab_size <= 1 << 24, f"vocab_size out of range: {self.vocab_size}")
        _require(0 < self.max_positions <= MAX_POSITIONS, f"max_positions out of range: {self.max_positions}")
        _require(0 < len(self.layers) <= MAX_LAYERS, f"a model has 1 to {MAX_LAYERS} layers, found {len(self.layers)}")
        _require(0 <= self.norm_eps < 1, f"norm_eps out of range: {self.norm_eps}")
        for token in self.eos_token_ids:
            _require(0 <= token < self.vocab_size, f"eos token {token} outside the vocabulary")

    @property
    def num_layers(self) -> int:
        """Decoder layers; all of them hold routed experts in format version 1."""
        return len(self.layers)

    @property
    def kv_bytes_per_position(self) -> int:
        """Bytes of the float32 keys and values of one position over all layers."""
        return sum(8 * layer.attention.num_kv_heads * layer.attention.head_size for layer in self.layers)

    def unit_shape(self, layer: int, projection: str) -> tuple[int, int]:
        """(rows, columns) of one projection of an expert: gate and up [F, D], down [D, F]."""
        width = self.layers[layer].experts.width
        return (self.hidden_size, width) if projection == "down" else (width, self.hidden_size)

    def expert_keys(self) -> tuple[ExpertKey, ...]:
        """All routed experts in storage order."""
        return tuple(
            ExpertKey(index, expert) for index, layer in enumerate(self.layers) for expert in range(layer.experts.count)
        )

    def dense_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every weight that is not a routed expert, in storage order.

        Matrices are [rows, columns] = [outputs, inputs]; norms are [D].
        """
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocab_size, hidden)}
        for index, layer in enumerate(self.layers):
            attention, prefix = layer.attention, f"layers.{index}."
            query = attention.num_heads * attention.head_size
            key_value = attention.num_kv_heads * attention.head_size
            shapes[prefix + "attention_norm"] = (hidden,)
            shapes[prefix + "query"] = (query, hidden)
            shapes[prefix + "key"] = (key_value, hidden)
            shapes[prefix + "value"] = (key_value, hidden)
            if attention.query_key_norm != "none":
                is_full = attention.query_key_norm == "full"
                shapes[prefix + "query_norm"] = (query if is_full else attention.head_size,)
                shapes[prefix + "key_norm"] = (key_value if is_full else attention.head_size,)
            shapes[prefix + "output"] = (hidden, query)
            shapes[prefix + "experts_norm"] = (hidden,)
            shapes[prefix + "router"] = (layer.experts.count, hidden)
        shapes["final_norm"] = (hidden,)
        if not self.tie_embeddings:
            shapes["lm_head"] = (self.vocab_size, hidden)
        return shapes
