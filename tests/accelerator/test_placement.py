"""Placement: inside the budget, popular first, and a refusal that names the least that works."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.errors import MemoryBudgetExceeded
from moec.runtime.accelerator.image import entry_bytes, expert_bytes
from moec.runtime.accelerator.placement import place_experts, working_bytes
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.expert_cache.bound_experts import bind_experts
from moec.runtime.model.dense_weights import load_dense
from moec.runtime.storage.read_storage import open_storage


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(0, 20000), st.integers(0, 500), st.randoms()
)
def test_what_is_placed_fits_and_nothing_more_popular_would_have(
    sizes: list[int], budget: int, dense: int, random: object
) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    floor = 2 * max(sizes) + dense + 7
    if budget < floor:
        with pytest.raises(MemoryBudgetExceeded, match=f"floor of {floor} "):
            place_experts(sizes, order, budget, 2, 7, dense)
        return
    found = place_experts(sizes, order, budget, 2, 7, dense)
    assert found.resident_bytes == sum(sizes[index] for index in found.resident)
    assert found.fixed_bytes == floor and found.fixed_bytes + found.resident_bytes <= budget
    room = budget - floor
    for index in order:  # in order of popularity, an expert that was left out did not fit
        assert (index in found.resident) == (sizes[index] <= room)
        room -= sizes[index] * (index in found.resident)


def test_sizes_are_known_before_anything_is_read(tiny_bundle: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    stored = bundle.manifest.stored_experts
    storage = open_storage(bundle, "buffered", verify=False)
    experts = bind_experts(bundle, stored, storage, load_dense(bundle, verify=False)).experts
    for entry, expert in zip(stored, experts, strict=True):
        assert entry_bytes(bundle.manifest.model, entry) == expert_bytes(expert) <= entry.size_bytes
    storage.close()


def test_working_memory_grows_with_the_pass(tiny_bundle: Path) -> None:
    manifest = open_bundle(tiny_bundle).manifest
    assert 0 < working_bytes(manifest, 1, may_group=False) < working_bytes(manifest, 64, may_group=False)
    assert working_bytes(manifest, 64, may_group=False) < working_bytes(manifest, 64, may_group=True)
