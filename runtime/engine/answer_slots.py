"""Slots of answers: the memory of keys and values, divided by the length of the longest text.

A run reserves keys and values of the whole context in each slot. Texts of an evaluation are much shorter, and their
lengths are known. A pass over more sequences reads each expert for more tokens.
"""

from __future__ import annotations

from moec.manifests.bundle import BundleManifest
from moec.manifests.runtime_limits import FEW_ANSWER_SLOTS, MOST_ANSWER_SLOTS

from ..memory.budget import MemoryPlan, resident_experts_bytes
from ..memory.elastic_cache import CacheBudget
from ..options.runtime import RuntimeOptions


def answer_slots(manifest: BundleManifest, plan: MemoryPlan, options: RuntimeOptions, positions: int) -> int:
    """Return the slots of `positions` positions that fit into the memory of keys and values.

    Where the cache grows into memory that keys and values leave, they leave room for all experts, or half of the room.
    """
    room = plan.kv_bytes
    one = -(-room * positions // (options.slots * plan.context))
    if plan.budget_bytes is not None and options.expert_cache is None:
        one = CacheBudget(manifest, plan, options).kv_bytes([positions])  # whole pages
        both = plan.kv_bytes + plan.cache_bytes
        spare = both - resident_experts_bytes(manifest)
        room = min(room, spare if spare >= FEW_ANSWER_SLOTS * one else both // 2)
    return min(MOST_ANSWER_SLOTS, room // one)
