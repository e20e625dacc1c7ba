"""Rotary position embedding: tables of cosines and sines."""

from __future__ import annotations

import numpy as np

from moec.manifests.model import RopeSpec

from ..kernels.elementary import power, sine_cosine


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
            powers = power(float(np.float32(rope.theta)), exponents).astype(np.float32)
            frequencies = np.float32(1) / powers
        angles = np.arange(context, dtype=np.float32)[:, None] * frequencies[None, :]
        magnitude = np.float32(rope.magnitude if long is None else long.magnitude)
        sine, cosine = sine_cosine(angles)
        self.cos, self.sin = cosine * magnitude, sine * magnitude
