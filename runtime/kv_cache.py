"""Keys and values of earlier tokens, allocated once for all slots."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moec.manifests.model import ModelSpec

from .address_space import map_anonymous


class KVCache:
    """float32 [S, Hkv, C, Dh] keys and values per layer; S slots (sequences), C context positions.

    What one head reads is one run of memory. Positions become resident as they are written. Latent attention has one
    array for both: its values are the first features of its keys.
    """

    def __init__(self, model: ModelSpec, slots: int, context: int) -> None:
        self.slots, self.context = slots, context
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        for layer in model.layers:
            attention = layer.attention
            shape = (slots, attention.cache_heads, context, attention.cache_size)
            self.keys.append(_zeros(shape))
            self.values.append(_zeros(shape) if attention.cache_arrays == 2 else self.keys[-1])

    def copy_slots(self, parents: Sequence[int], positions: int) -> None:
        """Slot i takes the first positions of slot parents[i]; all at once."""
        moved = [slot for slot, parent in enumerate(parents) if parent != slot]
        if not moved:
            return
        sources = [parents[slot] for slot in moved]
        for keys, values in zip(self.keys, self.values, strict=True):
            for array in (keys,) if values is keys else (keys, values):
                array[moved, :, :positions] = array[sources, :, :positions]


def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    _, memory = map_anonymous(4 * math.prod(shape), "keys and values", huge_pages=False)
    return memory.view(np.float32).reshape(shape)
