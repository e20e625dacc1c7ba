"""ModelSpec: what the runtime executes, free of any checkpoint's names.

Shape letters: D hidden, F expert width, E experts, K top-k, H heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .quant import ROWS_PER_BLOCK

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
    """Rotary position embedding over the first `rotary_size` of each head.

    interleaved: neighbours are rotated against each other; otherwise the first half against the second.
    frequencies: radians per position of each pair, of a scaled embedding; empty: theta ** (-2 i / rotary_size).
    magnitude: what cosines and sines are multiplied with.
    """

    theta: float
    rotary_size: int
    interleaved: bool = False
    frequencies: tuple[float, ...] = ()
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        _require(1 <= self.theta <= 1e15, f"rope theta must be 1 to 1e15, found {self.theta}")
        _require(0 < self.rotary_size <= 4096 and self.rotary_size % 2 == 0, "rotary_size must be even, 2 to 4096")
        _require(
            len(self.frequencies) in (0, self.rotary_size // 2) and all(0 <= f <= 1 for f in self.frequencies),
            "frequencies: expected rotary_size / 2 numbers from 0 to 1, or none",
        )
        _require(0 < self.magnitude <= 100, f"rope magnitude out of range: {self.magnitude}")


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Keys and values of all heads made from one small vector per position, which is what the cache holds.

    query_rank: of the queries' own bottleneck, 0: none. rank: of the shared vector. plain_size: features of a key that
    are not rotated. value_size: features of a value. norm_eps: of the norms behind both bottlenecks.
    Source: DeepSeek-V2, section 2.1.
    """

    query_rank: int
    rank: int
    plain_size: int
    value_size: int
    norm_eps: float

    def __post_init__(self) -> None:
        _require(0 <= self.query_rank <= 1 << 20, f"query_rank out of range: {self.query_rank}")
        _require(0 <= self.norm_eps < 1, f"norm_eps out of range: {self.norm_eps}")
        for name, size in (("rank", self.rank), ("plain_size", self.plain_size), ("value_size", self.value_size)):
            # Heads are cut out of packed matrices, whose rows come in blocks.
            whole = size % ROWS_PER_BLOCK == 0
            _require(0 < size <= 4096 and whole, f"{name} must be a multiple of {ROWS_PER_BLOCK} up to 4096: {size}")


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal attention with grouped key/value heads; sliding_window 0 means the whole context.

    query_key_norm: `full` norms queries and keys over all their heads together, `head` each head by itself, both before
    the rotary embedding. bias: of query, key and value (`inputs`), or of the output as well (`all`). scale: of scores,
    0: head_size ** -0.5. latent: keys and values come from a shared vector; head_size is then that of a whole key, its
    rotated features last. sinks: each head has one more score, of its own, that takes its share and adds nothing.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: RopeSpec
    sliding_window: int = 0
    query_key_norm: Literal["none", "full", "head"] = "none"
    bias: Literal["none", "inputs", "all"] = "none"
    scale: float = 0.0
    latent: LatentSpec | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        _require(0 < self.num_heads <= 4096 and 0 < self.head_size <= 4096, "heads and head_size must be 1 to 4096")
        _require(
            0 < self.num_kv_heads <= self.num_heads and self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}",
        )
        _require(0 <= self.sliding_window <= MAX_POSITIONS, f"sliding_window out of range: {self.sliding_window}")
        _require(self.rope.rotary_size <= self.head_size, "rotary_size must not exceed head_size")
        _require(0 <= self.scale <= 1e3, f"attention scale out of range: {self.scale}")
        if self.latent is not None:
            fits = self.latent.plain_size + self.rope.rotary_size == self.head_size
            _require(fits, f"head_size {self.head_size} must be the plain and the rotated features of a key")
            plain = (self.num_kv_heads, self.query_key_norm, self.bias, self.sliding_window or self.sinks)
            _require(
                plain == (self.num_heads, "none", "none", 0), "latent attention has no groups, norms, biases, window"
            )

    @property
    def score_scale(self) -> float:
        """What scores are multiplied with."""
        return self.scale or self.head_size**-0.5

    @property
    def cache_heads(self) -> int:
        """Heads that the cache of keys and values holds."""
        return 1 if self.latent is not None else self.num_kv_heads

    @property
    def cache_size(self) -> int:
        """Features of a head in the cache."""
        return self.head_size if self.latent is None else self.latent.rank + self.rope.rotary_size

    @property
    def cache_arrays(self) -> int:
        """2: keys and values; 1: one vector serves as both."""
        return 2 if self.latent is None else 1


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How router logits become experts and weights: scores over all experts, top-k, renormalised or not, scaled.

    correction: added to the scores of each expert when experts are chosen, not to their weights; empty: nothing.
    groups: experts are in so many groups in a row, and the top-k come from the best kept_groups of them, judged by
    their best expert (`max`) or their best two (`top2`). has_bias: added to the logits.
    """

    scoring: Literal["softmax", "sigmoid"]
    renormalize: bool
    scale: float = 1.0
    correction: tuple[float, ...] = ()
    groups: int = 1
    kept_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    has_bias: bool = False

    def __post_init__(self) -> None:
        _require(0 < self.scale <= 1e4, f"router scale out of range: {self.scale}")
        _require(0 < self.kept_groups <= self.groups <= MAX_EXPERTS, "kept_groups must be 1 to groups")
        _require(all(abs(c) <= 1e4 for c in self.correction), "correction: expected numbers of at most 10,000")

    @property
    def is_plain(self) -> bool:
        """Softmax and nothing else: the scores are the logits' order."""
        return self.scoring == "softmax" and not self.correction and self.groups == 1


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The routed experts of one layer: down(act(gate x) * (up x)) each. A layer without any has count and top_k 0.

    clamped_swiglu: with g = gate x at most `limit` and u = up x within +-limit, (u + 1) g / (1 + exp(-1.702 g)).
    has_bias: every projection adds one.
    """

    count: int
    top_k: int
    width: int
    activation: Literal["silu", "clamped_swiglu"]
    router: RouterSpec
    limit: float = 0.0
    has_bias: bool = False

    def __post_init__(self) -> None:
        _require(0 <= self.count <= MAX_EXPERTS, f"expert count must be 0 to {MAX_EXPERTS}, found {self.count}")
        least = min(self.count, 1)
        _require(least <= self.top_k <= self.count, f"top_k must be {least} to {self.count}, found {self.top_k}")
        _require(0 < self.width <= 1 << 20, f"expert width out of range: {self.width}")
        _require(0 <= self.limit <= 1e4, f"activation limit out of range: {self.limit}")
        _require(self.activation == "silu" or self.limit > 0, "a clamped activation needs a limit")
        groups, kept = self.router.groups, self.router.kept_groups
        _require(self.count % groups == 0, f"{groups} groups must divide {self.count} experts")
        if groups > 1 and self.count:
            size = self.count // groups
            _require(size >= (2 if self.router.group_score == "top2" else 1), "groups are too small for their score")
            _require(self.top_k <= kept * size, f"{kept} groups of {size} experts cannot give {self.top_k}")
        _require(len(self.router.correction) in (0, self.count), "correction: expected one number per expert, or none")


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """An expert that every token passes, resident with the dense weights; or the plain feed-forward of a layer without
    routed experts. has_gate: its output is multiplied with the sigmoid of a product of its own.
    """

    width: int
    has_gate: bool = False

    def __post_init__(self) -> None:
        _require(0 < self.width <= 1 << 20, f"shared expert width out of range: {self.width}")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: norm, attention, residual; norm, routed experts and the shared one, residual."""

    attention: AttentionSpec
    experts: ExpertsSpec
    shared: SharedSpec | None = None

    def __post_init__(self) -> None:
        _require(self.experts.count > 0 or self.shared is not None, "a layer must have routed experts or a shared one")
        _require(self.shared is None or self.experts.activation == "silu", "a shared expert has the activation silu")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only mixture of experts.

    norm_eps: of every RMS norm. max_positions: the longest context the checkpoint was made for.
    eos_token_ids end a generation. embedding_scale, residual_scale, logits_scale: what embeddings, the outputs of
    attention and of experts, and logits are multiplied with. Raises ValueError when fields contradict each other.
    """

    family: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tie_embeddings: bool
    layers: tuple[LayerSpec, ...]
    eos_token_ids: tuple[int, ...] = field(default=())
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0

    def __post_init__(self) -> None:
        _require(0 < self.hidden_size <= 1 << 20, f"hidden_size out of range: {self.hidden_size}")
        _require(0 < self.vocab_size <= 1 << 24, f"vocab_size out of range: {self.vocab_size}")
        _require(0 < self.max_positions <= MAX_POSITIONS, f"max_positions out of range: {self.max_positions}")
        _require(0 < len(self.layers) <= MAX_LAYERS, f"a model has 1 to {MAX_LAYERS} layers, found {len(self.layers)}")
        _require(0 <= self.norm_eps < 1, f"norm_eps out of range: {self.norm_eps}")
        _require(any(layer.experts.count for layer in self.layers), "no layer has routed experts")
        for scale in (self.embedding_scale, self.residual_scale, self.logits_scale):
            _require(0 < scale <= 1e4, f"scale out of range: {scale}")
        for token in self.eos_token_ids:
            _require(0 <= token < self.vocab_size, f"eos token {token} outside the vocabulary")

    @property
    def num_layers(self) -> int:
        """Decoder layers, with routed experts or without."""
        return len(self.layers)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers that hold routed experts."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.experts.count)

    @property
    def kv_bytes_per_position(self) -> int:
        """Bytes of the float32 keys and values of one position over all layers."""
        attentions = [layer.attention for layer in self.layers]
        return sum(4 * a.cache_arrays * a.cache_heads * a.cache_size for a in attentions)

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
            parts = {**_attention_shapes(layer.attention, hidden), **_feed_forward_shapes(layer, hidden)}
            shapes.update({f"layers.{index}.{name}": shape for name, shape in parts.items()})
        shapes["final_norm"] = (hidden,)
        if not self.tie_embeddings:
            shapes["lm_head"] = (self.vocab_size, hidden)
        return shapes


Shapes = dict[str, tuple[int, ...]]


def _attention_shapes(attention: AttentionSpec, hidden: int) -> Shapes:
    """Weights of one layer's attention, its norm in front."""
    query = attention.num_heads * attention.head_size
    key_value = attention.num_kv_heads * attention.head_size
    if attention.latent is not None:
        return _latent_shapes(attention, attention.latent, hidden)
    shapes: Shapes = {"attention_norm": (hidden,)}
    for name, rows in (("query", query), ("key", key_value), ("value", key_value)):
        shapes[name] = (rows, hidden)
    if attention.bias != "none":
        shapes.update({"query_bias": (query,), "key_bias": (key_value,), "value_bias": (key_value,)})
    if attention.query_key_norm != "none":
        is_full = attention.query_key_norm == "full"
        shapes["query_norm"] = (query if is_full else attention.head_size,)
        shapes["key_norm"] = (key_value if is_full else attention.head_size,)
    if attention.sinks:
        shapes["sinks"] = (attention.num_heads,)
    shapes["output"] = (hidden, query)
    if attention.bias == "all":
        shapes["output_bias"] = (hidden,)
    return shapes


def _latent_shapes(attention: AttentionSpec, latent: LatentSpec, hidden: int) -> Shapes:
    """key_up: of each head what turns a query's plain features into those of the shared vector; value_up: back."""
    heads, query = attention.num_heads, attention.num_heads * attention.head_size
    shapes: Shapes = {"attention_norm": (hidden,)}
    if latent.query_rank:
        shapes["query_down"] = (latent.query_rank, hidden)
        shapes["query_down_norm"] = (latent.query_rank,)
    shapes["query"] = (query, latent.query_rank or hidden)
    shapes["latent_down"] = (latent.rank + attention.rope.rotary_size, hidden)
    shapes["latent_norm"] = (latent.rank,)
    shapes["key_up"] = (heads * latent.rank, latent.plain_size)
    shapes["value_up"] = (heads * latent.value_size, latent.rank)
    shapes["output"] = (hidden, heads * latent.value_size)
    return shapes


def _feed_forward_shapes(layer: LayerSpec, hidden: int) -> Shapes:
    """The norm, the router, biases of experts one after the other, and the shared expert with its own gate."""
    shapes: Shapes = {"experts_norm": (hidden,)}
    experts = layer.experts
    if experts.count:
        shapes["router"] = (experts.count, hidden)
    if experts.count and experts.router.has_bias:
        shapes["router_bias"] = (experts.count,)
    if experts.count and experts.has_bias:
        shapes["experts_gate_bias"] = shapes["experts_up_bias"] = (experts.count * experts.width,)
        shapes["experts_down_bias"] = (experts.count * hidden,)
    if layer.shared is not None:
        shapes["shared_gate"] = (layer.shared.width, hidden)
        shapes["shared_up"] = (layer.shared.width, hidden)
        shapes["shared_down"] = (hidden, layer.shared.width)
        if layer.shared.has_gate:
            shapes["shared_router"] = (1, hidden)
    return shapes
