"""Manifests to test with: one by hand, and a strategy for any."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from moec.manifests.bundle import (
    DENSE_NAME,
    TABLES_NAME,
    BundleManifest,
    CalibrationSummary,
    CostSummary,
    DenseEntry,
    DeviceSummary,
    ExpertEntry,
    FileEntry,
    SourceSummary,
    experts_file_name,
    unit_offsets,
    version_of,
)
from moec.manifests.codec import DIGEST_FIELD, canonical_json, encode_manifest
from moec.manifests.files.limits import MANIFEST_JSON
from moec.manifests.files.strict_json import load_strict_json
from moec.manifests.model import (
    AttentionSpec,
    EncoderSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    RelativeBiasSpec,
    RopeSpec,
    RouterSpec,
    SharedSpec,
)
from moec.manifests.quant import QuantSpec

FORMATS = ("q2g32", "q3", "q5g32b", "q6s", "q4s", "q4g32", "q8g32s", "q8", "bf16", "fp16")
BF16 = QuantSpec.parse("bf16")
SHA = hashlib.sha256(b"").hexdigest()
XXH3 = SHA[:32]
Formats = tuple[QuantSpec, QuantSpec, QuantSpec]


def layer_spec(experts: int = 3, top_k: int = 2, width: int = 64) -> LayerSpec:
    attention = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, rope=RopeSpec(10000.0, 8))
    return LayerSpec(attention, ExpertsSpec(experts, top_k, width, "silu", RouterSpec("softmax", True)))


def model_spec(layers: Sequence[LayerSpec] = (), **changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "family": "mixtral", "hidden_size": 32, "vocab_size": 50, "max_positions": 128, "norm_eps": 1e-5,
        "tie_embeddings": False, "layers": tuple(layers) or (layer_spec(), layer_spec(experts=4, width=32)),
        "eos_token_ids": (2,),
    }  # fmt: skip
    return ModelSpec(**{**fields, **changes})


# A model with an encoder: two layers of it, three of a decoder, routed in 1, 3 and 4.
SELF = AttentionSpec(2, 2, 16, None, scale=1.0, relative_bias=RelativeBiasSpec(8, 20))
CROSS = AttentionSpec(2, 2, 16, None, scale=1.0)
ROUTER = RouterSpec("softmax", False)
ROUTED = ExpertsSpec(4, 1, 64, "relu", ROUTER)
CAPPED = replace(ROUTED, router=replace(ROUTER, capacity=3))
PLAIN = ExpertsSpec(0, 0, 64, "relu", ROUTER)
ENCODER_LAYERS = (
    LayerSpec(SELF, PLAIN, SharedSpec(64)),
    LayerSpec(SELF, CAPPED),
    LayerSpec(SELF, PLAIN, SharedSpec(64), CROSS),
    LayerSpec(SELF, ROUTED, None, CROSS),
    LayerSpec(SELF, ROUTED, None, CROSS),
)
WITH_ENCODER = ModelSpec("t", 32, 50, 128, 1e-6, True, ENCODER_LAYERS, (1,), encoder=EncoderSpec(2, 0))


def cost_of(model: ModelSpec, experts: Sequence[ExpertEntry], dense: Sequence[DenseEntry]) -> CostSummary:
    """docs/format.md, Cost, in the plainest words."""
    packed = weights = 0.0
    per_layer: dict[int, list[int]] = {}
    for entry in experts:
        per_layer.setdefault(entry.layer, []).append(entry.size_bytes)
        for projection in ("gate", "up", "down"):
            rows, columns = model.unit_shape(entry.layer, projection)
            packed += rows * entry.spec(projection).row_bytes(columns)
            weights += rows * columns
    top = [sorted(sizes)[-model.layers[layer].experts.top_k :] for layer, sizes in per_layer.items()]
    return CostSummary(
        expert_packed_bytes=int(packed),
        expert_padded_bytes=sum(entry.size_bytes for entry in experts),
        dense_packed_bytes=int(
            sum((e.shape[0] if len(e.shape) > 1 else 1) * e.spec.row_bytes(e.shape[-1]) for e in dense)
        ),
        expert_bits_per_weight=8 * packed / weights,
        expected_read_bytes_per_token=sum(map(min, top)),
        minimum_expert_bytes=max(map(sum, top)),
        kv_bytes_per_position=sum(2 * 4 * x.attention.num_kv_heads * x.attention.head_size for x in model.layers),
    )


def build_manifest(
    model: ModelSpec, formats: Sequence[Formats], dense: Sequence[QuantSpec], **rest: Any
) -> BundleManifest:
    """A consistent manifest; formats and dense are taken in turn."""
    experts, ends = [], {experts_file_name(layer): 4096 for layer in range(model.num_layers)}
    for number, key in enumerate(model.expert_keys()):
        gate, up, down = formats[number % len(formats)]
        size = unit_offsets(model, key.layer, {"gate": gate, "up": up, "down": down})[1]
        file = experts_file_name(key.layer)
        experts.append(ExpertEntry(key.layer, key.expert, file, ends[file], size, XXH3, gate, up, down))
        ends[file] += size
    weights = []
    for number, (name, shape) in enumerate(model.dense_shapes().items()):
        free = len(shape) == 2 and not name.endswith(".router")
        weights.append(DenseEntry(name, shape, dense[number % len(dense)] if free else BF16, XXH3))
    files = {DENSE_NAME: 5000, TABLES_NAME: 4096, **ends}
    fields: dict[str, Any] = {
        "format_version": version_of(model, weights, experts),
        "producer": "moec 0", "name": "tiny", "certified": True, "layout": "rows16",
        "model": model,
        "device": DeviceSummary("host", SHA, 1 << 30, 1 << 20), "cost": cost_of(model, experts, weights),
        "calibration": CalibrationSummary("gsm8k", SHA, 10, 100, 0, ("0.1",)), "source": SourceSummary("origin", ()),
        "options": {"loss": "2%"}, "required_cpu_features": (), "dense": tuple(weights), "experts": tuple(experts),
        "files": tuple(FileEntry(name, size, SHA) for name, size in sorted(files.items())),
    }  # fmt: skip
    return BundleManifest(**{**fields, **rest})


def example_manifest(**rest: Any) -> BundleManifest:
    specs = tuple(QuantSpec.parse(text) for text in ("q4g32", "q8", "q2g32"))
    return build_manifest(model_spec(), [specs, (BF16, specs[0], specs[1])], [BF16, specs[1]], **rest)  # type: ignore[list-item]


def plain_example() -> dict[str, Any]:
    """The example as JSON values, without its digest."""
    plain: dict[str, Any] = load_strict_json(encode_manifest(example_manifest()), MANIFEST_JSON)
    del plain[DIGEST_FIELD]
    return plain


def seal(plain: dict[str, Any]) -> bytes:
    """Return a manifest with a correct digest, as an attacker could write it."""
    return canonical_json({**plain, DIGEST_FIELD: hashlib.sha256(canonical_json(plain)).hexdigest()})


@st.composite
def manifests(draw: st.DrawFn) -> BundleManifest:
    """Any consistent manifest of a small model."""
    spec = st.sampled_from(FORMATS).map(QuantSpec.parse)
    layers = []
    for _ in range(draw(st.integers(1, 3))):
        experts = draw(st.integers(1, 4))
        layers.append(layer_spec(experts, draw(st.integers(1, experts)), draw(st.sampled_from((32, 64, 96)))))
    model = model_spec(
        layers,
        hidden_size=draw(st.sampled_from((32, 64))),
        vocab_size=draw(st.integers(3, 70)),
        norm_eps=draw(st.floats(0, 0.5)),
        tie_embeddings=draw(st.booleans()),
    )
    text = st.text(st.characters(codec="utf-8"), max_size=8)
    seed = draw(st.integers(-(2**62), 2**62))
    calibration = CalibrationSummary(draw(text), SHA, draw(st.integers(0, 9)), 7, seed, (draw(text),))
    return build_manifest(
        model,
        draw(st.lists(st.tuples(spec, spec, spec), min_size=1, max_size=3)),
        draw(st.lists(spec, min_size=1, max_size=3)),
        name=draw(text),
        certified=draw(st.booleans()),
        options=draw(st.dictionaries(text, text, max_size=3)),
        calibration=draw(st.sampled_from((None, calibration))),
        required_cpu_features=(),
    )


def put(plain: Any, path: str, value: Any) -> None:
    """Set `a.b[0].c`; the value `...` removes it."""
    parts = path.replace("[", ".[").split(".")
    for part in parts[:-1]:
        plain = plain[int(part[1:-1])] if part.startswith("[") else plain[part]
    last: Any = int(parts[-1][1:-1]) if parts[-1].startswith("[") else parts[-1]
    if value is ...:
        del plain[last]
    else:
        plain[last] = value


def get(plain: Any, path: str) -> Any:
    for part in path.replace("[", ".[").split("."):
        plain = plain[int(part[1:-1])] if part.startswith("[") else plain[part]
    return plain


def paths(value: Any, prefix: str = "") -> list[str]:
    """Yield the path of every field and every item."""
    if isinstance(value, dict):
        found = [(f"{prefix}.{key}" if prefix else key, item) for key, item in value.items()]
    else:
        found = [(f"{prefix}[{i}]", item) for i, item in enumerate(value)] if isinstance(value, list) else []
    return [path for name, item in found for path in (name, *paths(item, name))]
