"""Slots that go on from other slots, all at once and in little memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.layers.kv_cache import KVCache

SLOTS, CONTEXT, COPIED = 6, 8, 5


@pytest.fixture(scope="module")
def cache(tiny_bundle: Path) -> KVCache:
    return KVCache(open_bundle(tiny_bundle).manifest.model, SLOTS, CONTEXT)


@given(parents=st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS), seed=st.integers(0, 9))
def test_slots_take_over_all_at_once(cache: KVCache, parents: list[int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    for array in (*cache.keys, *cache.values):
        array[:] = draw.standard_normal(array.shape)
    before = [array.copy() for array in (*cache.keys, *cache.values)]
    cache.copy_slots(parents, COPIED)
    for array, old in zip((*cache.keys, *cache.values), before, strict=True):
        for slot in range(SLOTS):
            parent = parents[slot] if slot < len(parents) else slot
            assert np.array_equal(array[slot, :, :COPIED], old[parent, :, :COPIED])
            assert np.array_equal(array[slot, :, COPIED:], old[slot, :, COPIED:])
