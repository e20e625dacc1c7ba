"""Keys and values: slots that go on from other slots, and 16 bits, off by one rounding and deterministic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.errors import OptionError
from moec.runtime import load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.kernels.reference import as_cached
from moec.runtime.layers.kv_cache import KVCache
from moec.runtime.memory.elastic_cache import ElasticCache
from tests.gates.bundles import emit_bundle
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.tiny_models import TinyMixtral, save_tiny_mixtral
from tests.tiny_switch import TinySwitch, save_tiny_switch

SLOTS, CONTEXT, COPIED = 6, 8, 5


@pytest.fixture(scope="module", params=["float32", "float16"])
def cache(tiny_bundle: Path, request: pytest.FixtureRequest) -> KVCache:
    return KVCache(open_bundle(tiny_bundle).manifest.model, SLOTS, CONTEXT, request.param)


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


TOKENS = np.random.default_rng(8).integers(3, 250, 40).tolist()
HALF_UNIT = 2.0**-11
BESIDE_A_DEVICE: dict[str, Any] = {
    "context": 64, "kv": "float16", "accelerator": "torch-cpu", "accelerator_memory": "64MiB",
}  # fmt: skip


@pytest.fixture(scope="module", params=["heads", "deepseek-v2-groups-yarn", "gpt-oss"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain heads; one latent vector; sliding windows and sinks. 16-bit weights: nothing else is rounded."""
    root = tmp_path_factory.mktemp("half")
    if request.param == "heads":
        return emit_bundle(save_tiny_mixtral(root / "model", TinyMixtral(layers=3, seed=3)), root / "bundle")
    return emit_bundle(save_tiny_family(root / "model", TINY_FAMILIES[request.param]), root / "bundle")


FEW = TOKENS[:2]
"""So few tokens that none is close to the choice of another expert, which would change all later layers."""


def largest_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_logits_differ_by_the_rounding_of_keys_and_values(bundle: Path) -> None:
    with load(bundle, context=64) as floats, load(bundle, context=64, kv="float16") as halves:
        assert 0 < largest_error(halves.logits(FEW), floats.logits(FEW)) < 4 * HALF_UNIT
        floats.logits(TOKENS)
        halves.logits(TOKENS)
        # Values of the first layer are rounded once. Later layers have no influence on them.
        keys, rounded = (engine.kv.keys[0][0, :, : len(TOKENS)] for engine in (floats, halves))
        assert rounded.dtype == np.float16 and np.array_equal(rounded, keys.astype(np.float16))


def test_a_pass_computes_what_its_tokens_compute_one_by_one(bundle: Path) -> None:
    with load(bundle, context=64, kv="float16", expert_cache="60%") as engine:
        together = engine.logits(TOKENS)
        engine.begin_texts([0], [TOKENS])
        alone = [engine.decode([token], [0], [position]) for position, token in enumerate(TOKENS)]
        logits = np.concatenate([np.asarray(row).reshape(1, -1) for row in alone])
        assert np.array_equal(logits.view(np.uint32), together.view(np.uint32))
    with load(bundle, context=64, kv="float16", threads=1, io="buffered", prefetch="off") as other:
        assert np.array_equal(other.logits(TOKENS).view(np.uint32), together.view(np.uint32))


def test_they_take_half_of_the_memory(tiny_bundle: Path) -> None:
    with load(tiny_bundle) as floats, load(tiny_bundle, kv="float16") as halves:
        assert 2 * halves.memory.kv_bytes == floats.memory.kv_bytes
        held = [sum(array.nbytes for array in (*e.kv.keys, *e.kv.values)) for e in (floats, halves)]
        assert held == [floats.memory.kv_bytes, halves.memory.kv_bytes]
        assert "LOSSY (keys and values in 16 bits)" in halves.mode and "exact" in floats.mode
        both = [ElasticCache(e.bundle.manifest, e.memory, e.options, e.cache) for e in (floats, halves)]
        taken = [elastic.kv_bytes([floats.memory.context]) for elastic in both]
        assert taken[1] < taken[0]


def test_an_encoder_and_what_the_decoder_keeps_of_it(tmp_path: Path) -> None:
    folder = save_tiny_switch(tmp_path / "model", TinySwitch(seed=4))
    bundle = emit_bundle(folder, tmp_path / "bundle")
    with load(bundle, context=64) as floats, load(bundle, context=64, kv="float16") as halves:
        expected, found = floats.logits(TOKENS[:6], TOKENS), halves.logits(TOKENS[:6], TOKENS)
        assert 0 < largest_error(found, expected) < 32 * HALF_UNIT  # scores of this family are not scaled down
        crossed = (*halves.kv.cross_keys.values(), *halves.kv.cross_values.values())
        assert crossed and all(array.dtype == np.float16 for array in crossed)


def test_what_no_half_float_holds_is_the_largest_one() -> None:
    rows, halves = np.array([1e9, -1e9, 65519.0, 2**-25, 0.1], np.float32), np.zeros(1, np.float16)
    with np.errstate(all="raise", under="ignore"):
        found = as_cached(rows, halves)
    assert found.tolist() == [65504.0, -65504.0, 65504.0, 0.0, float(np.float16(0.1))]
    assert as_cached(rows, np.zeros(1, np.float32)) is rows


def test_refusals(tiny_bundle: Path) -> None:
    with pytest.raises(OptionError, match="keys and values on an accelerator are float32"):
        load(tiny_bundle, **BESIDE_A_DEVICE, accelerator_dense="device")


def test_beside_an_accelerator_attention_stays_here(tiny_bundle: Path) -> None:
    with load(tiny_bundle, context=64, kv="float16") as alone:
        expected = alone.logits(FEW)
    with load(tiny_bundle, **BESIDE_A_DEVICE, cooperation="cpu") as with_device:
        assert with_device.kv.keys[0].dtype == np.float16
        assert largest_error(with_device.logits(FEW), expected) < 1e-4
