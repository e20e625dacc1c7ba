"""Resize the expert cache to the memory that the rest of the budget does not use yet.

A budget includes keys and values of the whole context, and the working memory of a long prompt. A short sequence uses
little of both. Before each pass the cache takes the memory that this pass leaves free. So it never exceeds the budget
and uses all of it.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Sequence

import numpy as np

from moec.manifests.bundle import BundleManifest
from moec.profiles.freed_memory import give_back_freed_memory
from moec.profiles.memory_floor import held_positions, longest_pass, pass_bytes

from ..expert_cache.interface import StreamingCache
from ..layers.kv_cache import KV_TYPES
from ..options.runtime import RuntimeOptions
from .budget import MemoryPlan, resident_experts_bytes

_TRIMMED_TOKENS = 16
"""Tokens of a pass from which the allocator returns its free memory afterwards."""


class CacheBudget:
    """Size of the expert cache that a budget allows."""

    def __init__(self, manifest: BundleManifest, plan: MemoryPlan, options: RuntimeOptions) -> None:
        """plan: has budget_bytes. Its cache_bytes is the size next to a full context and the longest pass."""
        self._plan, self._context, self._element_bytes = plan, plan.context, np.dtype(KV_TYPES[options.kv]).itemsize
        self._model = manifest.model
        attentions = self._model.cached_attentions
        self._attentions = Counter(attentions)
        self._ranges = self._held_ranges()
        self._token_bytes = pass_bytes(manifest.model, 1)
        self._longest_pass = longest_pass(manifest.model, options.slots, plan.context)
        self._experts_bytes = resident_experts_bytes(manifest)

    def capacity_bytes(self, tokens: int, longest: Sequence[int]) -> int:
        """Return the size of the cache during a pass.

        tokens: tokens of the pass.
        longest: positions that were written in each slot.
        """
        scratch = self._token_bytes * (self._longest_pass - tokens)
        unused = max(scratch + self._plan.kv_bytes - self.kv_bytes(longest, tokens), 0)
        return min(self._plan.cache_bytes + unused, self._experts_bytes)

    def kv_bytes(self, longest: Sequence[int], tokens: int = 0) -> int:
        """Return the bytes of keys, values and states in memory. Each head of a layer and slot has its own pages.

        tokens: of the pass, which layers with windows hold in addition.
        """
        total, page = 0, mmap.PAGESIZE
        for ranges, position_bytes, most in self._ranges:
            held = [min(positions, most) for positions in longest]
            for positions in [*held, min(tokens, self._context - most)]:
                run = positions * position_bytes
                total += ranges * (-(-run // page) + 1) * page  # a range may begin within a page
        return total + 2 * self._model.state_bytes * sum(positions > 0 for positions in longest)

    def _held_ranges(self) -> list[tuple[int, int, int]]:
        """Return the ranges of pages, bytes of a position, and most positions of each kind of attention."""
        return [
            (
                layers * attention.cache_arrays * attention.cache_heads,
                attention.cache_size * self._element_bytes,
                held_positions(self._model, attention, self._context),
            )
            for attention, layers in self._attentions.items()
        ]


class ElasticCache(CacheBudget):
    """Resizes an expert cache before each pass, if a budget is set. A cache of a given size keeps it."""

    def __init__(
        self, manifest: BundleManifest, plan: MemoryPlan, options: RuntimeOptions, cache: StreamingCache
    ) -> None:
        """plan: as in CacheBudget."""
        super().__init__(manifest, plan, options)
        self._cache = cache
        self._longest = [0] * options.slots  # positions that were ever written; their pages stay in memory

    def begin(self, slots: int, context: int) -> None:
        """Take note of new keys and values, of which no position is written."""
        self._longest, self._context = [0] * slots, context
        self._ranges = self._held_ranges()
        self._resize(1)

    def before_pass(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Free the memory that keys, values and working memory of this pass need."""
        for slot, position in zip(slots, positions, strict=True):
            self._longest[slot] = max(self._longest[slot], position + 1)
        self._resize(len(slots))

    def after_pass(self, tokens: int) -> None:
        """Take the working memory of a long pass for the cache."""
        if tokens > _TRIMMED_TOKENS:
            give_back_freed_memory()
            self._resize(1)

    def _resize(self, tokens: int) -> None:
        capacity_bytes = self.capacity_bytes(tokens, self._longest)
        if capacity_bytes != self._cache.capacity_bytes:  # no lock for most tokens, which need no new page
            self._cache.resize(capacity_bytes)
