"""Parts of a layer's attention, and its weights.

Shape letters: D hidden, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .optional_fields import OPTIONAL
from .quant import ROWS_PER_BLOCK

MAX_POSITIONS = 1 << 28
Shapes = dict[str, tuple[int, ...]]


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True)
class LongRopeSpec:
    """Form of a rotary embedding in a context longer than original_positions. It applies to all positions.

    A run has one form, because cached keys were rotated with it.
    frequencies: as in RopeSpec, one for each pair.
    magnitude: as in RopeSpec.
    Source: LongRoPE, Shorter context window recovery.
    """

    original_positions: int
    frequencies: tuple[float, ...]
    magnitude: float

    def __post_init__(self) -> None:
        positions = self.original_positions
        require(0 < positions < MAX_POSITIONS, f"original_positions out of range: {positions}")
        _check_rotation(self.frequencies, self.magnitude)


def _check_rotation(frequencies: tuple[float, ...], magnitude: float) -> None:
    require(all(0 <= f <= 1 for f in frequencies), "frequencies: expected numbers from 0 to 1")
    require(0 < magnitude <= 100, f"rope magnitude out of range: {magnitude}")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding over the first `rotary_size` features of each head.

    interleaved: adjacent features are rotated in pairs; otherwise the first half with the second.
    frequencies: radians per position of each pair, for a scaled embedding; empty: theta ** (-2 i / rotary_size).
    magnitude: factor of cosines and sines.
    long: form in contexts longer than the original one.
    """

    theta: float
    rotary_size: int
    interleaved: bool = False
    frequencies: tuple[float, ...] = ()
    magnitude: float = 1.0
    long: LongRopeSpec | None = field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        require(1 <= self.theta <= 1e15, f"rope theta must be 1 to 1e15, found {self.theta}")
        require(0 < self.rotary_size <= 4096 and self.rotary_size % 2 == 0, "rotary_size must be even, 2 to 4096")
        pairs = self.rotary_size // 2
        require(len(self.frequencies) in (0, pairs), "frequencies: expected rotary_size / 2 numbers, or none")
        _check_rotation(self.frequencies, self.magnitude)
        fits = self.long is None or len(self.long.frequencies) == pairs
        require(fits, "long: expected rotary_size / 2 frequencies")


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Keys and values of all heads are made from one small vector per position. The cache holds that vector.

    query_rank: size of the bottleneck of queries, 0 for none.
    rank: size of the shared vector.
    plain_size: features of a key that are not rotated.
    value_size: features of a value.
    norm_eps: eps of the norms after both bottlenecks.
    Source: DeepSeek-V2, section 2.1.
    """

    query_rank: int
    rank: int
    plain_size: int
    value_size: int
    norm_eps: float

    def __post_init__(self) -> None:
        require(0 <= self.query_rank <= 1 << 20, f"query_rank out of range: {self.query_rank}")
        require(0 <= self.norm_eps < 1, f"norm_eps out of range: {self.norm_eps}")
        for name, size in (("rank", self.rank), ("plain_size", self.plain_size), ("value_size", self.value_size)):
            # Heads are parts of packed matrices, whose rows are stored in blocks.
            whole = size % ROWS_PER_BLOCK == 0
            require(0 < size <= 4096 and whole, f"{name} must be a multiple of {ROWS_PER_BLOCK} up to 4096: {size}")


@dataclass(frozen=True, slots=True)
class RelativeBiasSpec:
    """A bias per head on every score, by the distance of key and query: one table for all layers of a stack.

    Distances up to half of the buckets have one bucket each. Larger distances up to max_distance share ever wider
    buckets. The last bucket is for all distances beyond. An encoder uses half of the buckets for each direction.
    Source: T5, section 2.1.
    """

    buckets: int
    max_distance: int

    def __post_init__(self) -> None:
        require(4 <= self.buckets <= 4096 and self.buckets % 4 == 0, "buckets must be a multiple of 4 up to 4096")
        exact = self.buckets // 2
        require(exact < self.max_distance <= MAX_POSITIONS, f"max_distance must exceed {exact}: {self.max_distance}")


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal attention with grouped key/value heads. In an encoder every token sees all the others.

    rope, relative_bias: encoding of positions; None if it is not used.
    sliding_window: positions that a token sees; 0 means the whole context.
    query_key_norm: `full` norms all heads of queries and keys together, `head` each head separately. Both come before
        rope.
    bias: of query, key and value (`inputs`), or also of the output (`all`).
    scale: factor of scores; 0 means head_size ** -0.5.
    latent: keys and values come from a shared vector. Then head_size is the size of a whole key, rotated features last.
    sinks: each head has one more learned score, which takes a share of the softmax and adds nothing.
    output_gate: before the output product, features are multiplied by this function of a product of the normed stream.
    gates_heads: the gate has one number for each head, not for each feature.
    value_norm: each head of values passes an RMS norm without weights.
    value_is_key: values are the products of the keys, before norm and rope.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: RopeSpec | None
    sliding_window: int = 0
    query_key_norm: Literal["none", "full", "head"] = "none"
    bias: Literal["none", "inputs", "all"] = "none"
    scale: float = 0.0
    latent: LatentSpec | None = None
    sinks: bool = False
    relative_bias: RelativeBiasSpec | None = field(default=None, metadata=OPTIONAL)
    output_gate: Literal["none", "sigmoid", "softplus"] = field(default="none", metadata=OPTIONAL)
    gates_heads: bool = field(default=False, metadata=OPTIONAL)
    value_norm: bool = field(default=False, metadata=OPTIONAL)
    value_is_key: bool = field(default=False, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        require(0 < self.num_heads <= 4096 and 0 < self.head_size <= 4096, "heads and head_size must be 1 to 4096")
        require(
            0 < self.num_kv_heads <= self.num_heads and self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}",
        )
        require(0 <= self.sliding_window <= MAX_POSITIONS, f"sliding_window out of range: {self.sliding_window}")
        require(self.rotary_size <= self.head_size, "rotary_size must not exceed head_size")
        require(0 <= self.scale <= 1e3, f"attention scale out of range: {self.scale}")
        require(self.output_gate != "none" or not self.gates_heads, "gates_heads needs an output_gate")
        require(self.bias == "none" or not self.value_is_key, "values that are keys have no bias of their own")
        if self.latent is not None:
            require(self.rope is not None, "latent attention needs a rotary embedding")
            fits = self.latent.plain_size + self.rotary_size == self.head_size
            require(fits, f"head_size {self.head_size} must be the plain and the rotated features of a key")
            extras = self.sliding_window or self.sinks or self.relative_bias or self.output_gate != "none"
            extras = extras or self.value_norm or self.value_is_key
            plain = (self.num_kv_heads, self.query_key_norm, self.bias, bool(extras))
            require(
                plain == (self.num_heads, "none", "none", False),
                "latent attention has no groups, norms, biases, window, gate",
            )

    @property
    def rotary_size(self) -> int:
        """Number of rotated features of a head."""
        return 0 if self.rope is None else self.rope.rotary_size

    @property
    def is_bare(self) -> bool:
        """True if there are only heads and a scale, as required for attention over another sequence."""
        extras = self.rope or self.relative_bias or self.latent or self.sliding_window or self.sinks
        extras = extras or self.value_norm or self.value_is_key
        return not extras and (self.query_key_norm, self.bias, self.output_gate) == ("none", "none", "none")

    @property
    def score_scale(self) -> float:
        """Factor of scores."""
        return self.scale or self.head_size**-0.5

    @property
    def cache_heads(self) -> int:
        """Heads in the cache of keys and values."""
        return 1 if self.latent is not None else self.num_kv_heads

    @property
    def cache_size(self) -> int:
        """Features of a head in the cache."""
        return self.head_size if self.latent is None else self.latent.rank + self.rotary_size

    @property
    def cache_arrays(self) -> int:
        """Number of cache arrays: 2 for keys and values, 1 if one vector serves as both."""
        return 2 if self.latent is None else 1


def attention_shapes(attention: AttentionSpec, hidden: int) -> Shapes:
    """Return the shapes of the weights of one layer's attention, with the norm before it."""
    query = attention.num_heads * attention.head_size
    key_value = attention.num_kv_heads * attention.head_size
    if attention.latent is not None:
        return _latent_shapes(attention, attention.latent, hidden)
    shapes: Shapes = {"attention_norm": (hidden,)}
    for name, rows in (("query", query), ("key", key_value), ("value", key_value)):
        if name != "value" or not attention.value_is_key:
            shapes[name] = (rows, hidden)
    if attention.bias != "none":
        shapes.update({"query_bias": (query,), "key_bias": (key_value,), "value_bias": (key_value,)})
    if attention.query_key_norm != "none":
        is_full = attention.query_key_norm == "full"
        shapes["query_norm"] = (query if is_full else attention.head_size,)
        shapes["key_norm"] = (key_value if is_full else attention.head_size,)
    if attention.sinks:
        shapes["sinks"] = (attention.num_heads,)
    if attention.output_gate != "none":
        shapes["output_gate"] = (attention.num_heads if attention.gates_heads else query, hidden)
    shapes["output"] = (hidden, query)
    if attention.bias == "all":
        shapes["output_bias"] = (hidden,)
    return shapes


def _latent_shapes(attention: AttentionSpec, latent: LatentSpec, hidden: int) -> Shapes:
    """Return the shapes of latent attention.

    key_up: for each head, maps a query's plain features to features of the shared vector.
    value_up: for each head, maps the shared vector to a value.
    """
    heads, query = attention.num_heads, attention.num_heads * attention.head_size
    shapes: Shapes = {"attention_norm": (hidden,)}
    if latent.query_rank:
        shapes["query_down"] = (latent.query_rank, hidden)
        shapes["query_down_norm"] = (latent.query_rank,)
    shapes["query"] = (query, latent.query_rank or hidden)
    shapes["latent_down"] = (latent.rank + attention.rotary_size, hidden)
    shapes["latent_norm"] = (latent.rank,)
    shapes["key_up"] = (heads * latent.rank, latent.plain_size)
    shapes["value_up"] = (heads * latent.value_size, latent.rank)
    shapes["output"] = (hidden, heads * latent.value_size)
    return shapes
