"""Slots of answers: the memory of keys and values, divided by the length of the longest text.

A run reserves keys and values of the whole context in each slot. Texts of an evaluation are much shorter, and their
lengths are known. A pass over more sequences reads each expert for more tokens.
"""

from __future__ import annotations

import numpy as np

from moec.manifests.bundle import BundleManifest
from moec.manifests.runtime_limits import MOST_ANSWER_SLOTS
from moec.profiles.memory_floor import answers_kv_bytes, kv_bytes

from ..layers.kv_cache import KV_TYPES
from ..memory.budget import MemoryPlan, resident_experts_bytes
from ..memory.elastic_cache import CacheBudget
from ..options.runtime import RuntimeOptions


def answer_slots(manifest: BundleManifest, plan: MemoryPlan, options: RuntimeOptions, positions: int) -> int:
    """Return the slots of `positions` positions that fit into the memory of keys and values.

    Where the cache grows into memory that keys and values leave, they share it (`answers_kv_bytes`).
    """
    room = plan.kv_bytes
    one = kv_bytes(manifest.model, positions, 1, np.dtype(KV_TYPES[options.kv]).itemsize)
    if plan.budget_bytes is not None and options.expert_cache is None:
        one = CacheBudget(manifest, plan, options).kv_bytes([positions])  # whole pages
        room = min(room, answers_kv_bytes(room + plan.cache_bytes, resident_experts_bytes(manifest), one))
    return min(MOST_ANSWER_SLOTS, room // one)
