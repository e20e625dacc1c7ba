"""Rotary position embedding: tables of cosines and sines."""

from __future__ import annotations

import numpy as np

from moec.manifests.model import RopeSpec


class RotaryTables:
    """Cosines and sines of every position, float32 [C, R / 2]. Angles are float32, as in reference models.

    If the context is longer than the original one, all positions use the long form.
    context: number of positions, C.
    """

    def __init__(self, rope: RopeSpec, context: int) -> None:
        self.rope = rope
        long = rope.long if rope.long is not None and context > rope.long.original_positions else None
        if long is not None or rope.frequencies:
            frequencies = np.array(rope.frequencies if long is None else long.frequencies, np.float32)
        else:
            exponents = np.arange(0, rope.rotary_size, 2, dtype=np.float32) / np.float32(rope.rotary_size)
            frequencies = (1.0 / np.power(np.float32(rope.theta), exponents)).astype(np.float32)
        angles = np.arange(context, dtype=np.float32)[:, None] * frequencies[None, :]
        magnitude = np.float32(rope.magnitude if long is None else long.magnitude)
        self.cos, self.sin = np.cos(angles) * magnitude, np.sin(angles) * magnitude
