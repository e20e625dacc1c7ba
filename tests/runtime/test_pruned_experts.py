"""Bundles with experts left out: nothing of them is stored, read, computed or counted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from moec.manifests.model import ExpertKey
from moec.manifests.quant import QuantSpec
from moec.runtime import load
from moec.runtime.bundle import open_bundle, verify_bundle
from tests.gates.bundles import emit_bundle
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

TOKENS = np.random.default_rng(7).integers(4, 260, 48).tolist()
PROMPT_TOKENS = 16
PRUNED = (ExpertKey(0, 1), ExpertKey(1, 0), ExpertKey(1, 5), *(ExpertKey(2, expert) for expert in range(8)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pruned") / "model"
    return save_tiny_mixtral(folder, TinyMixtral(layers=3, experts=8, top_k=4, seed=8))


@pytest.fixture(scope="module")
def pruned(checkpoint: Path) -> Path:
    return emit_bundle(checkpoint, checkpoint.parent / "bundle", pruned=PRUNED)


@pytest.fixture(scope="module")
def zeroed(checkpoint: Path) -> Path:
    """The same checkpoint with zeros for the weights of those experts, all of them stored."""
    folder = save_tiny_mixtral(checkpoint.parent / "zeroed", TinyMixtral(layers=3, experts=8, top_k=4, seed=8))
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    for layer, expert in PRUNED:
        for name in [n for n in weights if n.startswith(f"model.layers.{layer}.block_sparse_moe.experts.{expert}.")]:
            weights[name] = weights[name] * 0
    save_file(weights, file, {"format": "pt"})
    return emit_bundle(folder, checkpoint.parent / "zeroed-bundle")


def run(bundle: Path, **options: Any) -> tuple[np.ndarray, Any]:
    with load(bundle, context=64, **options) as engine:
        engine.cache.finish_warming()
        engine.begin_sequence()
        engine.prefill(TOKENS[:PROMPT_TOKENS])
        rows = [engine.decode([TOKENS[at]], [0], [at]) for at in range(PROMPT_TOKENS, len(TOKENS))]
        engine.cache.check_invariants()
        return np.concatenate(rows), engine.cache.stats


def test_what_is_left_out_counts_as_zero_and_is_never_read(pruned: Path, zeroed: Path) -> None:
    expected, every = run(zeroed, expert_cache="100%", prefetch="off")
    cache = str(open_bundle(pruned).manifest.cost.minimum_expert_bytes)
    for options in ({"expert_cache": "100%"}, {"expert_cache": cache}, {"expert_cache": cache, "prefetch": "off"}):
        logits, stats = run(pruned, **options)
        assert np.array_equal(logits.view(np.uint32), expected.view(np.uint32)), options
        assert 0 < stats.lookups < every.lookups
    manifest = open_bundle(pruned).manifest
    assert [entry.key for entry in manifest.experts if entry.size_bytes == 0] == sorted(PRUNED)
    assert stats.bytes_read == stats.misses * max(entry.size_bytes for entry in manifest.experts) > 0


def test_the_file_of_a_layer_that_keeps_no_expert_holds_none(pruned: Path) -> None:
    opened = open_bundle(pruned)
    verify_bundle(opened)
    assert all(tensor.size_bytes == 0 for tensor in opened.headers["experts-00002.safetensors"].values())
    manifest = opened.manifest
    kept = sum(not entry.is_pruned for entry in manifest.experts)
    assert manifest.cost.expert_bits_per_weight == pytest.approx(16 * kept / len(manifest.experts))


def test_lossy_modes_take_what_is_left_out_as_there(checkpoint: Path) -> None:
    """Never low, skipped, replaced or a stand-in: these are decisions on misses."""
    target = checkpoint.parent / "versions"
    bundle = emit_bundle(checkpoint, target, bitwidth=8, low="q2g32", pruned=[ExpertKey(0, e) for e in range(8)])
    manifest = open_bundle(bundle).manifest
    assert {entry.layer for entry in manifest.low_experts} == {1, 2}
    half: dict[str, Any] = {"expert_cache": "50%", "cache_state": "cold", "prefetch": "off"}
    for modes in ({"dynamic_precision": "0,0"}, {"cache_routing": "margin=0.9,drop=0.3"}):
        with load(bundle, context=64, **half, **modes) as engine:
            engine.begin_sequence()
            engine.prefill(TOKENS[:PROMPT_TOKENS])
            for at in range(PROMPT_TOKENS, len(TOKENS)):
                engine.decode([TOKENS[at]], [0], [at])
            counts, stats = engine.mode_counts, engine.cache.stats
            assert counts is not None and counts.ranks == 3 * 4 * (len(TOKENS) - PROMPT_TOKENS)
            assert 0 < counts.missed <= counts.ranks * 2 / 3
            assert counts.low + counts.skipped + counts.replaced + counts.dropped > 0
            assert stats.lookups <= (len(TOKENS) - PROMPT_TOKENS) * 2 * 4 + 2 * 8, "none of layer 0"


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_an_expert_is_left_out_as_a_whole(pruned: Path, projection: str) -> None:
    manifest = open_bundle(pruned).manifest
    entry = next(entry for entry in manifest.experts if not entry.is_pruned)
    with pytest.raises(ValueError, match="left out as a whole"):
        dataclasses.replace(entry, **{projection: QuantSpec(0)})


def test_nothing_but_experts_can_be_left_out(pruned: Path) -> None:
    manifest = open_bundle(pruned).manifest
    dense = [dataclasses.replace(e, spec=QuantSpec(0)) if e.name == "lm_head" else e for e in manifest.dense]
    with pytest.raises(ValueError, match=r"dense\[lm_head\]: format q0 cannot hold"):
        dataclasses.replace(manifest, dense=tuple(dense))
