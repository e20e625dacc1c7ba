"""Random valid bundles of every kind that the format allows, with correct digests. One seed gives one bundle.

`moec verify` accepts each of them. Draws of a model are repeated until ModelSpec accepts one. Weights are ordinary
numbers, zeros or random bytes. Some scales may be infinite, NaN or as large as possible.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moec.manifests.bundle import QUALITY_NAME, BundleManifest
from moec.manifests.model import (
    AttentionSpec,
    EncoderSpec,
    ExpertKey,
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
from moec.manifests.quant import QuantSpec
from tests.hostile.bundle_writer import (
    BF16,
    FP16,
    KINDS_OF_WEIGHTS,
    BundlePlan,
    Specs,
    Weights,
    smaller_than,
    tokenizer_json,
    write_bundle,
)

MAX_DRAWS = 10_000
KINDS = ("plain", "plain", "latent", "bias", "encoder", "static", "wide")
"""Main kinds of models. Everything else is drawn for each layer."""
FORMATS = tuple(
    QuantSpec.parse(text)
    for text in (
        "bf16", "fp16", "mxfp4", "q1", "q1g32", "q1g32b", "q1.6s", "q1.6g64s", "q2", "q2g32", "q2s", "q2g32b", "q3",
        "q3g32s", "q3g64b", "q4", "q4g32", "q4s", "q4g64s", "q4g32b", "q5", "q5g32s", "q5g64b", "q6s", "q6g64", "q8",
        "q8g32", "q8s", "q8g64s", "q8g128",
    )
)  # fmt: skip
LEFT_OUT = QuantSpec.parse("q0")
_LOW = tuple(spec for spec in FORMATS if spec.bitwidth < 4)
_WEIGHTS = (*KINDS_OF_WEIGHTS, "numbers", "numbers", "spoiled")


def chance(source: random.Random, share: float) -> bool:
    """Return True with a probability of `share`."""
    return source.random() < share


def random_model(source: random.Random) -> ModelSpec:
    """Return a model that the format accepts."""
    for _ in range(MAX_DRAWS):
        try:
            return _draw_model(source)
        except ValueError:  # parts that contradict each other: drawn again
            continue
    raise AssertionError("no draw gave a valid model")


def _draw_model(source: random.Random) -> ModelSpec:
    kind = source.choice(KINDS)
    # Only 16-bit formats fit widths that are no multiple of 32.
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
    """Return the layers of an encoder or a decoder. They are equal, or each is drawn separately."""
    attention, experts = _draw_attention(source, kind, encodes), _draw_experts_spec(source, kind, vocabulary, encodes)
    are_alike, layers = chance(source, 0.5), list[LayerSpec]()
    for _ in range(count):
        own = attention
        if not are_alike:
            own = _draw_attention(source, kind, encodes)
            own = own if own.latent is not None else replace(own, relative_bias=attention.relative_bias)
            experts = _draw_experts_spec(source, kind, vocabulary, encodes)
        layer = _draw_layer(source, own, experts)
        layers.append(replace(layer, norms_after=kind not in ("encoder", "norms") and chance(source, 0.15)))
    return layers


def _draw_layer(source: random.Random, attention: AttentionSpec, experts: ExpertsSpec) -> LayerSpec:
    shared = None
    if chance(source, 0.35):
        shared = SharedSpec(source.choice((32, 64, 33)), has_gate=chance(source, 0.4))
        if chance(source, 0.4):  # a dense layer: no routed experts
            experts = ExpertsSpec(0, 0, experts.width, experts.activation, RouterSpec("softmax", False))
    return LayerSpec(attention, experts, shared)


def _draw_bare(source: random.Random) -> AttentionSpec:
    """Return attention that is allowed over the encoder's states."""
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
        **_draw_gate(source),
        relative_bias=bias if kind in ("bias", "encoder") and chance(source, 0.8) else None,
    )


def _draw_gate(source: random.Random) -> dict[str, Any]:
    gate = source.choice(("none", "none", "none", "sigmoid", "softplus"))
    return {"output_gate": gate, "gates_heads": gate != "none" and chance(source, 0.5)}


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


def _draw_experts_spec(source: random.Random, kind: str, vocabulary: int, encodes: bool) -> ExpertsSpec:
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
    """Return a router.

    static_vocabulary: tokens of a static routing; 0: none.
    """
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
    elif "correction" in fields and chance(source, 0.2):
        return RouterSpec("sigmoid", corrects_logits=True, **fields)
    if encodes and chance(source, 0.5):
        fields["capacity"] = source.choice((1, 2, 64, 1 << 28))
    return RouterSpec(source.choice(("softmax", "sigmoid")), **fields)


def write_random_bundle(folder: Path, seed: int) -> BundleManifest:
    """Write the bundle of this seed to the new folder, and return its manifest."""
    return write_bundle(folder, *draw_plan(seed))


def draw_plan(seed: int) -> tuple[BundlePlan, Weights]:
    """Return the content of the bundle of this seed."""
    source = random.Random(seed)
    model = random_model(source)
    experts = _draw_experts(model, source)
    files = {"tokenizer.json": tokenizer_json(model.vocab_size)}
    if chance(source, 0.5):
        files[QUALITY_NAME] = b"{}\n"
    plan = BundlePlan(
        model=model,
        dense=_draw_dense(model, source),
        experts=experts,
        low=_draw_low(model, experts, source) if chance(source, 0.4) else {},
        tables=_draw_tables(model, source) if chance(source, 0.7) else {},
        files=files,
        name=f"seed {seed}",
        read_share=source.random(),
        calibration_seed=seed if chance(source, 0.3) else None,
    )
    return plan, Weights(source, source.choice(_WEIGHTS))


def _draw_dense(model: ModelSpec, source: random.Random) -> Specs:
    floats, usual, found = source.choice((BF16, FP16)), source.choice(FORMATS), Specs()
    for name, shape in model.dense_shapes().items():
        spec = usual if chance(source, 0.5) else source.choice(FORMATS)
        is_free = len(shape) == 2 and not name.endswith("router") and spec.fits(shape[1])
        found[name] = spec if is_free else floats
    return found


def _draw_specs(model: ModelSpec, layer: int, source: random.Random, formats: Sequence[QuantSpec]) -> Specs:
    """Return a format for each projection of an expert, 16 bits if no other fits."""
    found = Specs()
    for projection in model.layers[layer].experts.projections:
        columns = model.unit_shape(layer, projection)[1]
        found[projection] = source.choice([spec for spec in formats if spec.fits(columns)] or [BF16, FP16])
    return found


def _draw_experts(model: ModelSpec, source: random.Random) -> dict[ExpertKey, Specs]:
    """Return formats of all routed experts. Some are left out if their router allows it."""
    found = dict[ExpertKey, Specs]()
    has_left_out, formats = chance(source, 0.6), FORMATS if chance(source, 0.4) else (source.choice(FORMATS),)
    for layer in model.expert_layers:
        experts = model.layers[layer].experts
        most = experts.count - experts.top_k if has_left_out and experts.can_lose_experts else 0
        left_out = source.sample(range(experts.count), source.randint(0, most))
        for expert in range(experts.count):
            specs = _draw_specs(model, layer, source, formats)
            found[ExpertKey(layer, expert)] = dict.fromkeys(specs, LEFT_OUT) if expert in left_out else specs
    return found


def _draw_low(model: ModelSpec, experts: dict[ExpertKey, Specs], source: random.Random) -> dict[ExpertKey, Specs]:
    """Return low versions of the experts for which smaller formats are drawn."""
    found, share = dict[ExpertKey, Specs](), source.choice((0.4, 1.0))
    for key, own in experts.items():
        specs = _draw_specs(model, key.layer, source, _LOW)
        is_left_out = own["up"].is_pruned
        if chance(source, share) and not is_left_out and smaller_than(model, key.layer, specs, own):
            found[key] = specs
    return found


def _draw_tables(model: ModelSpec, source: random.Random) -> dict[str, np.ndarray]:
    """Return tables with any counts, because they are only advice."""
    layers, experts = model.num_layers, max(layer.experts.count for layer in model.layers)

    def counts(*shape: int) -> np.ndarray:
        drawn = [source.choice((0, 1, 7, 2**32 - 1)) for _ in range(math.prod(shape))]
        return np.array(drawn, np.uint32).reshape(shape)

    drawn = [[source.randrange(end) for end in (layers, experts, experts)] for _ in range(source.choice((0, 3, 30)))]
    keys = sorted({(layer, before, last) for layer, before, last in drawn})
    lengths = [source.randint(0, 4) for _ in keys]
    return {
        "popularity": counts(layers, experts),
        "transitions": counts(layers - 1, experts, experts),
        "path.keys": np.array(keys, np.int32).reshape(-1, 3),
        "path.offsets": np.cumsum([0, *lengths], dtype=np.int64),
        "path.experts": np.array([source.randrange(experts) for _ in range(sum(lengths))], np.uint16),
        "path.counts": counts(sum(lengths)),
    }
