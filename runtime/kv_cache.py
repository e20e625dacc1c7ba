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
        steps = _copies(parents)
        for keys, values in zip(self.keys, self.values, strict=True) if steps else ():
            for array in (keys,) if values is keys else (keys, values):
                kept = array[0, :, :0]
                for source, target in steps:
                    if target is None:
                        kept = array[source, :, :positions].copy()
                    else:
                        array[target, :, :positions] = kept if source is None else array[source, :, :positions]


def _copies(parents: Sequence[int]) -> list[tuple[int | None, int | None]]:
    """Copies from slot to slot, one after the other, that together are the one of all at once; None: a slot put aside.

    At most one slot is put aside at a time.
    """
    waiting = {slot: parent for slot, parent in enumerate(parents) if parent != slot}
    steps: list[tuple[int | None, int | None]] = []
    while waiting:
        free = next((slot for slot in waiting if slot not in waiting.values()), None)
        if free is not None:
            steps.append((waiting.pop(free), free))
            continue
        first, source = next(iter(waiting.items()))  # only rings are left, where each waits for the next
        steps.append((first, None))
        target = first
        while source != first:
            steps.append((source, target))
            del waiting[target]
            target, source = source, waiting[source]
        steps.append((None, target))
        del waiting[target]
    return steps


def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    _, memory = map_anonymous(4 * math.prod(shape), "keys and values", huge_pages=False)
    return memory.view(np.float32).reshape(shape)
