"""A model with an encoder, by hand: two layers of it, three of a decoder, routed in 1, 3 and 4."""

from __future__ import annotations

from dataclasses import replace

from moec.manifests.model import (
    AttentionSpec,
    EncoderSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    RelativeBiasSpec,
    RouterSpec,
    SharedSpec,
)

SELF = AttentionSpec(2, 2, 16, None, scale=1.0, relative_bias=RelativeBiasSpec(8, 20))
CROSS = AttentionSpec(2, 2, 16, None, scale=1.0)
ROUTER = RouterSpec("softmax", False)
ROUTED = ExpertsSpec(4, 1, 64, "relu", ROUTER)
CAPPED = replace(ROUTED, router=replace(ROUTER, capacity=3))
PLAIN = ExpertsSpec(0, 0, 64, "relu", ROUTER)
LAYERS = (
    LayerSpec(SELF, PLAIN, SharedSpec(64)),
    LayerSpec(SELF, CAPPED),
    LayerSpec(SELF, PLAIN, SharedSpec(64), CROSS),
    LayerSpec(SELF, ROUTED, None, CROSS),
    LayerSpec(SELF, ROUTED, None, CROSS),
)
MODEL = ModelSpec("t", 32, 50, 128, 1e-6, True, LAYERS, (1,), encoder=EncoderSpec(2, 0))
