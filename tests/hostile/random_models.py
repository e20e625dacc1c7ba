"""Random models of every kind that the format allows, small enough to be run: drawn until ModelSpec takes them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, TypeVar

from moec.manifests.model import (
    AttentionSpec,
    EncoderSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    LongRopeSpec,
    ModelSpec,
    RelativeBiasSpec,
    RopeSpec,
    RouterSpec,
    SharedSpec,
    StaticRouting,
)

MAX_DRAWS = 10_000
KINDS = ("plain", "plain", "latent", "bias", "encoder", "static", "wide")
"""What a model is above all; everything else is drawn for each layer."""
Value = TypeVar("Value")


def chance(source: random.Random, share: float) -> bool:
    """True with a probability of `share`."""
    return source.random() < share


def random_model(source: random.Random) -> ModelSpec:
    """A model that the format accepts."""
    for _ in range(MAX_DRAWS):
        try:
            return _draw_model(source)
        except ValueError:  # parts that contradict each other: drawn again
            continue
    raise AssertionError("no draw gave a valid model")


def _draw_model(source: random.Random) -> ModelSpec:
    kind = source.choice(KINDS)
    # Widths that 32 does not divide go with 16-bit formats alone.
    hidden = source.choice((32, 32, 64, 96, 128, 1, 24, 33))
    vocabulary = source.choice((3, 17, 50, 64, 70))
    decoder = source.choice((1, 2, 2, 3, 4, 6))
    encoder = source.choice((1, 2, 3)) if kind == "encoder" else 0
    layers = [*_draw_stack(source, kind, encoder, vocabulary, True), *_draw_stack(source, kind, decoder, vocabulary)]
    if encoder:
        cross = _draw_bare(source)
        layers[encoder:] = [
            replace(layer, cross=_draw_bare(source) if chance(source, 0.3) else cross) for layer in layers[encoder:]
        ]
    norm = "layer" if not encoder and chance(source, 0.25) else "rms"
    model = ModelSpec(
        family=source.choice(("mixtral", "x", "")),
        hidden_size=hidden,
        vocab_size=vocabulary,
        max_positions=source.choice((1, 16, 64, 300, 5000)),
        norm_eps=source.choice((0.0, 1e-6, 1e-5, 0.5)),
        tie_embeddings=chance(source, 0.5),
        layers=tuple(layers),
        eos_token_ids=tuple(source.sample(range(vocabulary), source.choice((0, 0, 1, 2)))),
        embedding_scale=_scale(source),
        residual_scale=_scale(source),
        logits_scale=_scale(source),
        encoder=EncoderSpec(encoder, source.randrange(vocabulary)) if encoder else None,
        norm=norm,
        has_head_bias=chance(source, 0.2),
    )
    return model


def _scale(source: random.Random) -> float:
    return source.choice((1.0, 1.0, 1.0, 0.22, 12.0, 1e4, 1e-30))


def _draw_stack(
    source: random.Random, kind: str, count: int, vocabulary: int, encodes: bool = False
) -> list[LayerSpec]:
    """The layers of an encoder or a decoder; they are alike, or each is drawn by itself."""
    attention, experts = _draw_attention(source, kind, encodes), _draw_experts(source, kind, vocabulary, encodes)
    are_alike, layers = chance(source, 0.5), list[LayerSpec]()
    for _ in range(count):
        own = attention
        if not are_alike:
            own = _draw_attention(source, kind, encodes)
            own = own if own.latent is not None else replace(own, relative_bias=attention.relative_bias)
            experts = _draw_experts(source, kind, vocabulary, encodes)
        layers.append(_draw_layer(source, own, experts))
    return layers


def _draw_layer(source: random.Random, attention: AttentionSpec, experts: ExpertsSpec) -> LayerSpec:
    shared = None
    if chance(source, 0.35):
        shared = SharedSpec(source.choice((32, 64, 33)), has_gate=chance(source, 0.4))
        if chance(source, 0.4):  # a dense layer: no routed experts
            experts = ExpertsSpec(0, 0, experts.width, experts.activation, RouterSpec("softmax", False))
    return LayerSpec(attention, experts, shared)


def _draw_bare(source: random.Random) -> AttentionSpec:
    """Draw an attention over the encoder's states."""
    heads = source.choice((1, 2, 4))
    kv_heads = source.choice([count for count in (1, 2, 4) if heads % count == 0])
    return AttentionSpec(heads, kv_heads, source.choice((8, 16, 5)), None, scale=source.choice((0.0, 1.0)))


def _draw_rope(source: random.Random, size: int) -> RopeSpec:
    pairs = size // 2
    own = tuple(source.choice((0.0, 1.0, source.random())) for _ in range(pairs)) if chance(source, 0.3) else ()
    long = None
    if chance(source, 0.25):
        frequencies = tuple(source.random() for _ in range(pairs))
        long = LongRopeSpec(source.choice((1, 4, 1000)), frequencies, source.choice((1.0, 1.2, 100.0)))
    magnitude = source.choice((1.0, 1.0, 0.5, 100.0))
    return RopeSpec(source.choice((1.0, 1e4, 1e15)), size, chance(source, 0.5), own, magnitude, long)


def _draw_attention(source: random.Random, kind: str, encodes: bool) -> AttentionSpec:
    heads = source.choice((1, 2, 3, 4, 8))
    kv_heads = source.choice([count for count in (1, 2, 3, 4, 8) if heads % count == 0])
    head_size = source.choice((2, 8, 16, 32, 5))
    scale = source.choice((0.0, 0.0, 1.0, 0.125, 1e3))
    if kind == "latent" and chance(source, 0.85):
        return _draw_latent(source, heads, scale)
    fitting = [size for size in (2, 4, 8, 16, 32) if size <= head_size]
    rope = _draw_rope(source, source.choice(fitting)) if chance(source, 0.8) else None
    bias = RelativeBiasSpec(source.choice((4, 8, 32)), source.choice((20, 128, 1 << 28)))
    return AttentionSpec(
        heads,
        kv_heads,
        head_size,
        None if kind == "encoder" and chance(source, 0.5) else rope,
        sliding_window=source.choice((0, 0, 1, 3, 1 << 28)) if not encodes else 0,
        query_key_norm=source.choice(("none", "none", "full", "head")),
        bias=source.choice(("none", "none", "inputs", "all")),
        scale=scale,
        sinks=not encodes and chance(source, 0.25),
        relative_bias=bias if kind in ("bias", "encoder") and chance(source, 0.8) else None,
    )


def _draw_latent(source: random.Random, heads: int, scale: float) -> AttentionSpec:
    plain, rotated = source.choice((16, 32)), source.choice((2, 8, 16))
    latent = LatentSpec(
        query_rank=source.choice((0, 32, 24)),
        rank=source.choice((16, 32, 64)),
        plain_size=plain,
        value_size=source.choice((16, 32)),
        norm_eps=source.choice((0.0, 1e-6)),
    )
    return AttentionSpec(heads, heads, plain + rotated, _draw_rope(source, rotated), scale=scale, latent=latent)


def _draw_experts(source: random.Random, kind: str, vocabulary: int, encodes: bool) -> ExpertsSpec:
    count = 40 if kind == "wide" else source.choice((1, 2, 3, 4, 6, 8))
    activation = source.choice(("silu", "silu", "clamped_swiglu", "relu"))
    top_k = min(count, source.choice((1, 2, 2, 3, 8)))
    return ExpertsSpec(
        count,
        top_k,
        source.choice((32, 64, 33, 1)) if chance(source, 0.9) else 256,
        activation,
        _draw_router(source, count, top_k, vocabulary if kind == "static" else 0, encodes),
        limit=source.choice((7.0, 1e4, 1e-3)) if activation == "clamped_swiglu" else source.choice((0.0, 1.0)),
        has_bias=activation != "relu" and chance(source, 0.25),
    )


def _draw_router(source: random.Random, count: int, top_k: int, static_vocabulary: int, encodes: bool) -> RouterSpec:
    """static_vocabulary: tokens of a static routing; 0: there is none."""
    fields: dict[str, Any] = {"renormalize": chance(source, 0.5), "has_bias": chance(source, 0.2)}
    fields["scale"] = source.choice((1.0, 1.0, 2.5, 1e4, 1e-30))
    if static_vocabulary and not encodes and chance(source, 0.7):
        chosen = [expert for _ in range(static_vocabulary) for expert in source.sample(range(count), top_k)]
        if chance(source, 0.4):
            fields.update(renormalize=False, has_bias=False)
            return RouterSpec("uniform", static=StaticRouting(tuple(chosen)), **fields)
        return RouterSpec(source.choice(("softmax", "sigmoid")), static=StaticRouting(tuple(chosen)), **fields)
    if top_k == 2 and chance(source, 0.2):
        return RouterSpec("sparsemixer", False, margin=source.choice((0.0, 0.02, 1.0, 1e4)))
    if chance(source, 0.3):
        fields["correction"] = tuple(source.choice((0.0, -1e4, 1e4, source.uniform(-1, 1))) for _ in range(count))
    if chance(source, 0.3):
        groups = source.choice([number for number in (1, 2, 4, 8) if count % number == 0])
        fields.update(groups=groups, kept_groups=source.randint(1, groups), group_score=source.choice(("max", "top2")))
    if encodes and chance(source, 0.5):
        fields["capacity"] = source.choice((1, 2, 64, 1 << 28))
    return RouterSpec(source.choice(("softmax", "sigmoid")), **fields)
