"""The expert cache lives in what the rest of the budget does not use yet.

A budget holds keys and values for the whole context and the working memory of a long prompt; while a short sequence is
decoded, most of both is empty. Before every pass the cache is brought to what that pass leaves free, so that it never
exceeds the budget and never leaves it idle.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Sequence

import numpy as np

from moec.manifests.bundle import BundleManifest
from moec.profiles.freed_memory import give_back_freed_memory
from moec.profiles.memory_floor import longest_pass, pass_bytes

from ..expert_cache.interface import StreamingCache
from ..layers.kv_cache import KV_TYPES
from ..options.runtime import RuntimeOptions
from .budget import MemoryPlan

_TRIMMED_TOKENS = 16
"""After a pass of more tokens the allocator is asked to give back what it keeps."""


class BudgetRoom:
    """How large a budget lets the expert cache be."""

    def __init__(self, manifest: BundleManifest, plan: MemoryPlan, options: RuntimeOptions) -> None:
        """plan: with budget_bytes; its cache_bytes is the size beside a full context and the longest pass."""
        self._plan, self._element_bytes = plan, np.dtype(KV_TYPES[options.kv]).itemsize
        attentions = manifest.model.cached_attentions
        self._heads = Counter((a.cache_arrays * a.cache_heads, a.cache_size) for a in attentions)
        self._token_bytes = pass_bytes(manifest.model, 1)
        self._longest_pass = longest_pass(manifest.model, options.slots, plan.context)
        self._experts_bytes = manifest.cost.expert_padded_bytes

    def capacity_bytes(self, tokens: int, longest: Sequence[int]) -> int:
        """The cache beside a pass of so many tokens. longest: positions written, per slot."""
        scratch = self._token_bytes * (self._longest_pass - tokens)
        unused = max(scratch + self._plan.kv_bytes - self.kv_bytes(longest), 0)
        return min(self._plan.cache_bytes + unused, self._experts_bytes)

    def kv_bytes(self, longest: Sequence[int]) -> int:
        """Keys and values in memory: every head of every layer and slot has a run of its own, in whole pages."""
        total, page = 0, mmap.PAGESIZE
        for (runs, head_size), layers in self._heads.items():
            for positions in longest:
                run = min(positions, self._plan.context) * head_size * self._element_bytes
                total += layers * runs * (-(-run // page) + 1) * page  # runs need not begin with a page
        return total


class ElasticCache(BudgetRoom):
    """Sizes one expert cache pass by pass. For budgets; a cache of a given size stays as it is."""

    def __init__(
        self, manifest: BundleManifest, plan: MemoryPlan, options: RuntimeOptions, cache: StreamingCache
    ) -> None:
        """plan: as of BudgetRoom."""
        super().__init__(manifest, plan, options)
        self._cache = cache
        self._longest = [0] * options.slots  # positions ever written: their pages stay

    def before_pass(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Make room for the keys, values and working memory of this pass."""
        for slot, position in zip(slots, positions, strict=True):
            self._longest[slot] = max(self._longest[slot], position + 1)
        self._resize(len(slots))

    def after_pass(self, tokens: int) -> None:
        """Take over the working memory of a long pass."""
        if tokens > _TRIMMED_TOKENS:
            give_back_freed_memory()
            self._resize(1)

    def _resize(self, tokens: int) -> None:
        capacity_bytes = self.capacity_bytes(tokens, self._longest)
        if capacity_bytes != self._cache.capacity_bytes:  # most tokens open no page: no lock for them
            self._cache.resize(capacity_bytes)
