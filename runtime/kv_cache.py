"""Keys and values of earlier tokens, allocated once for all slots."""

from __future__ import annotations

import numpy as np

from moec.manifests.model import ModelSpec


class KVCache:
    """float32 [S, Hkv, C, Dh] keys and values per layer; S slots (sequences), C context positions.

    What one head reads is one run of memory.
    """

    def __init__(self, model: ModelSpec, slots: int, context: int) -> None:
        self.slots, self.context = slots, context
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        for layer in model.layers:
            shape = (slots, layer.attention.num_kv_heads, context, layer.attention.head_size)
            self.keys.append(np.zeros(shape, np.float32))
            self.values.append(np.zeros(shape, np.float32))
