"""Random valid bundles in real folders with correct digests. One seed gives one bundle.

`moec verify` accepts each of them. Weights are ordinary numbers, zeros or random bytes. Some scales may be infinite,
NaN or as large as possible.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moec.manifests.bundle import QUALITY_NAME, BundleManifest
from moec.manifests.model import ExpertKey, ModelSpec
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
from tests.hostile.random_models import chance, random_model

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
