"""G9: a 16-bit bundle computes the logits of transformers from the same 16-bit values.

Families that transformers lacks are held against their published definition, tests/oracles/models.py. docs/families.md
says what that can and cannot show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from moec.manifests.model import ExpertKey
from moec.manifests.quant import UNIT_ALIGNMENT_BYTES
from moec.runtime import kernels, load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.kernels.profile import timed_kernels
from tests.compiler.lowered import lowered, walked_logits
from tests.gates.bundles import emit_bundle, stepwise_logits
from tests.oracles.checkpoints import OWN_FAMILIES, save_own_family
from tests.oracles.models import load_oracle
from tests.tiny_families import CHOSEN, TINY_FAMILIES, save_tiny_family
from tests.tiny_models import (
    TINY_MODELS,
    VOCABULARY,
    TinyMixtral,
    save_tiny_mixtral,
    save_tiny_olmoe,
    save_tiny_qwen3_moe,
)

pytestmark = pytest.mark.oracle

PROMPT_TOKENS, DECODE_STEPS = 40, 32
TOLERANCE = 1e-3  # of the largest logit


OLMOES = {
    "olmoe": (TinyMixtral(experts=8, top_k=4), {}),
    "olmoe-grouped": (TinyMixtral(heads=4, kv_heads=1, experts=6, seed=6), {"norm_topk_prob": True}),
    "olmoe-tied-half": (TinyMixtral(kv_heads=4, layers=3, tied=True, dtype="float16", seed=7), {"rms_norm_eps": 1e-6}),
}
QWEN3S = {
    "qwen3-moe": (TinyMixtral(experts=8, top_k=4, head_size=32), {"norm_topk_prob": True}),
    "qwen3-moe-top1": (TinyMixtral(experts=6, top_k=1, kv_heads=1, head_size=48, seed=8), {}),
    "qwen3-moe-top8-tied-half": (
        TinyMixtral(experts=16, top_k=8, layers=3, tied=True, dtype="float16", shard_size="100KB", seed=9),
        {"norm_topk_prob": True, "rms_norm_eps": 1e-6},
    ),
    "qwen3-moe-window": (TinyMixtral(sliding_window=5, heads=3, kv_heads=3, seed=10), {"norm_topk_prob": True}),
}


def save(name: str, folder: Path) -> Path:
    """Write the checkpoint of that name."""
    if name in TINY_FAMILIES:
        return save_tiny_family(folder, TINY_FAMILIES[name])
    if name in QWEN3S:
        tiny, config = QWEN3S[name]
        return save_tiny_qwen3_moe(folder, tiny, **config)
    if name in OLMOES:
        tiny, config = OLMOES[name]
        return save_tiny_olmoe(folder, tiny, **config)
    return save_tiny_mixtral(folder, TINY_MODELS[name])


def transformers_logits(folder: Path, tokens: list[int]) -> np.ndarray:
    """Return the logits [T, V] float32 of the checkpoint."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return np.asarray(reference(torch.tensor([tokens])).logits[0].numpy())


def our_logits(bundle: Path, tokens: list[int], **options: Any) -> np.ndarray:
    """Return the logits [T, V] float32 of a bundle: the beginning in one pass, the rest token by token."""
    with load(bundle, expert_cache="100%", context=128, **options) as engine:
        return stepwise_logits(engine, tokens, PROMPT_TOKENS)


def check_equal(found: np.ndarray, expected: np.ndarray) -> None:
    """Compare logits with the tolerance of this gate."""
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


FURTHER = (*list(OLMOES)[1:], *QWEN3S, *(name for name in TINY_FAMILIES if name not in CHOSEN.values()))
"""Configurations beside one of each family. `make oracles` runs them; CI does not."""


@pytest.mark.gate("G9")
@pytest.mark.parametrize(
    "name",
    [
        *sorted(TINY_MODELS),
        next(iter(OLMOES)),
        *(name for name in TINY_FAMILIES if name not in FURTHER),
        *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER),
    ],
)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path / "model")
    tokens = np.random.default_rng(7).integers(0, VOCABULARY, PROMPT_TOKENS + DECODE_STEPS).tolist()
    bundle = emit_bundle(folder, tmp_path / "bundle")
    check_equal(our_logits(bundle, tokens), transformers_logits(folder, tokens))
    if kernels.compiled() is not None:
        check_calls(bundle)


def check_calls(bundle: Path) -> None:
    """A token takes two calls of the extension in each layer, and at most four outside layers."""
    with load(bundle, expert_cache="50%", context=16) as engine:
        assert engine.code_path.why_not_one_call is None
        engine.prefill([5])
        with timed_kernels() as times:
            engine.decode([6], [0], [1])
        layers, calls = engine.model.spec.num_layers, dict(times.calls)
    assert calls.pop("experts_layer") == layers and calls.pop("attend", 0) + calls.pop("mix", 0) == layers
    assert sum(calls.values()) <= 4, calls


@pytest.mark.gate("G9")
def test_greedy_continuation_equals_transformers(tmp_path: Path) -> None:
    folder = save_tiny_mixtral(tmp_path / "model")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = [5, 60, 31, 7, 90, 2, 8]
    expected = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=DECODE_STEPS, pad_token_id=0)[
        0, len(prompt) :
    ].tolist()
    with load(emit_bundle(folder, tmp_path / "bundle"), expert_cache="100%", context=128) as engine:
        found = [step.token_id for step in engine.generate(prompt, max_new_tokens=DECODE_STEPS)]
    assert found == expected


@pytest.mark.gate("G9")
def test_the_gate_sees_a_wrong_weight(tmp_path: Path) -> None:
    """A bundle with exchanged gate and up of one expert exceeds the tolerance by a factor of ten."""
    folder = save_tiny_mixtral(tmp_path / "model")
    bundle = emit_bundle(folder, tmp_path / "bundle")
    tokens = list(range(10, 10 + PROMPT_TOKENS))
    expected = transformers_logits(folder, tokens)
    check_equal(our_logits(bundle, tokens), expected)
    swap_gate_and_up(bundle, layer=0, expert=1)
    wrong = our_logits(bundle, tokens, verify=False)
    with pytest.raises(AssertionError):
        check_equal(wrong, expected)
    assert np.abs(wrong - expected).max() > 10 * TOLERANCE * np.abs(expected).max()


def swap_gate_and_up(bundle: Path, layer: int, expert: int) -> None:
    """Exchange the bytes of gate and up of one expert in a bundle. They have the same shape and format."""
    manifest = open_bundle(bundle).manifest
    entry = next(each for each in manifest.experts if each.key == ExpertKey(layer, expert))
    experts = manifest.model.layers[layer].experts
    assert entry.gate == entry.up
    size = round(experts.width * entry.up.row_bytes(manifest.model.hidden_size))
    assert size % UNIT_ALIGNMENT_BYTES == 0
    with (bundle / entry.file).open("r+b") as file:
        file.seek(entry.offset_bytes)
        gate, up = file.read(size), file.read(size)
        assert gate != up
        file.seek(entry.offset_bytes)
        file.write(up + gate)


@pytest.fixture(scope="module", params=list(OWN_FAMILIES))
def own_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    save_own_family(root / "model", OWN_FAMILIES[request.param])
    emit_bundle(root / "model", root / "bundle")
    return root


@pytest.mark.gate("G9")
def test_logits_equal_the_published_definition(own_family: Path) -> None:
    tokens = np.random.default_rng(7).integers(0, VOCABULARY, PROMPT_TOKENS + DECODE_STEPS).tolist()
    expected = load_oracle(own_family / "model")(torch.tensor([tokens]))[0].numpy()
    check_equal(our_logits(own_family / "bundle", tokens), expected)
    # The compile measures on layers of a stand-in of transformers, which are compared in the same way.
    found = walked_logits(lowered(own_family / "model"), [tokens])[0].numpy()
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.gate("G9")
def test_greedy_continuations_equal_the_published_definition(own_family: Path) -> None:
    prompt = np.random.default_rng(4).integers(4, 260, 7).tolist()
    expected = load_oracle(own_family / "model").greedy(prompt, DECODE_STEPS, end=2)
    with load(own_family / "bundle", expert_cache="100%", context=128) as engine:
        found = [step.token_id for step in engine.generate(prompt, max_new_tokens=DECODE_STEPS)]
    assert found == expected
