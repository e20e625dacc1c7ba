"""Buckets of distances against transformers, over every distance that a context has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersAttention

from moec.manifests.model import RelativeBiasSpec
from moec.runtime.layers.attention import bias_by_distance, distance_buckets

pytestmark = pytest.mark.oracle

FURTHEST = 5000


@pytest.mark.parametrize("sees_ahead", [False, True])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (64, 512), (4, 3), (32, 100), (16, 64)])
def test_buckets_are_those_of_transformers(buckets: int, max_distance: int, sees_ahead: bool) -> None:
    distances = np.arange(-FURTHEST, FURTHEST + 1)
    expected = SwitchTransformersAttention._relative_position_bucket(
        torch.from_numpy(distances), sees_ahead, buckets, max_distance
    )
    found = distance_buckets(distances, RelativeBiasSpec(buckets, max_distance), sees_ahead)
    assert np.array_equal(found, expected.numpy())


@pytest.mark.parametrize("sees_ahead", [False, True])
def test_each_head_has_its_own_number_for_a_distance(sees_ahead: bool) -> None:
    spec, heads, context = RelativeBiasSpec(8, 20), 3, 30
    table = np.random.default_rng(1).normal(size=spec.buckets * heads).astype(np.float32)
    found = bias_by_distance(table, spec, context, sees_ahead)
    assert found.shape == (heads, 2 * context - 1) and found.dtype == np.float32 and found.flags.c_contiguous
    for distance in (-29, -3, 0, 1, 29):
        (bucket,) = distance_buckets(np.array([distance]), spec, sees_ahead)
        expected = [table[bucket * heads + head] for head in range(heads)]
        assert found[:, context - 1 + distance].tolist() == expected
