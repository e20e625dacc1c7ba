"""G9 for parts that only Phi-3.5-MoE has: its routing, and rotary embeddings with a short and a long form."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from moec.manifests.model import ExpertsSpec, RouterSpec
from moec.runtime import load
from moec.runtime.layers.routing import RoutingRule
from tests.gates.bundles import emit_bundle, stepwise_logits
from tests.tiny_families import LONGROPE, TINY_FAMILIES, save_tiny_family
from tests.tiny_models import VOCABULARY

pytestmark = [pytest.mark.gate("G9"), pytest.mark.oracle]
TOLERANCE = 1e-3  # of the largest logit
ORIGINAL, WHOLE = 32, 128
TOKENS = np.random.default_rng(11).integers(4, VOCABULARY, 72).tolist()


# Logits near each other, with equal ones and both signs, because the margin depends on them.
@given(
    st.lists(
        st.lists(st.integers(-40, 40).map(lambda n: n / 16), min_size=5, max_size=5).map(tuple), min_size=1, max_size=4
    ),
    st.sampled_from([0.0, 0.01, 0.1, 0.45]),
)
def test_sparsemixer_is_that_of_transformers(rows: list[tuple[float, ...]], jitter: float) -> None:
    logits = np.array(rows, np.float32)
    weights, experts = sparsemixer(torch.from_numpy(logits), jitter, training=False)
    rule = RoutingRule(ExpertsSpec(5, 2, 32, "silu", RouterSpec("sparsemixer", False, margin=2 * jitter)))
    chosen, found = rule.route(logits)
    assert chosen.tolist() == experts.tolist()
    np.testing.assert_allclose(found, weights.numpy(), rtol=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Phi-3.5-MoE checkpoint whose original context is a quarter of its context."""
    rope = {**LONGROPE, "original_max_position_embeddings": ORIGINAL}
    tiny = TINY_FAMILIES["phimoe"]
    changed = replace(tiny, config={**tiny.config, "rope_parameters": rope, "max_position_embeddings": WHOLE})
    return save_tiny_family(tmp_path_factory.mktemp("longrope") / "model", changed)


@pytest.fixture(scope="module")
def bundle(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emit_bundle(folder, tmp_path_factory.mktemp("longrope") / "bundle")


def oracle(folder: Path, is_long: bool = False) -> Any:
    """Return the model of transformers.

    is_long: give the length to its rotary embedding, as transformers 4.x does.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if is_long:
        rotary = model.model.rotary_emb
        rotary.rope_init_fn = partial(rotary.rope_init_fn, seq_len=ORIGINAL + 1)
    return model


def logits_of(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(torch.tensor([tokens])).logits[0].numpy())


def decoded(bundle: Path, context: int, tokens: list[int], prompt: int) -> np.ndarray:
    """Return the logits of a prompt, and of the tokens after it, one by one."""
    with load(bundle, expert_cache="100%", context=context) as engine:
        return stepwise_logits(engine, tokens, prompt)


def differ(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_up_to_the_original_context_the_short_form_is_that_of_transformers(folder: Path, bundle: Path) -> None:
    tokens = TOKENS[:ORIGINAL]
    assert differ(decoded(bundle, ORIGINAL, tokens, 8), logits_of(oracle(folder), tokens)) <= TOLERANCE


def test_left_to_itself_a_run_has_the_original_context(folder: Path, bundle: Path) -> None:
    with load(bundle, expert_cache="100%") as engine:
        assert engine.memory.context == ORIGINAL
        prompt = TOKENS[:10]
        expected = oracle(folder).generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=ORIGINAL - len(prompt), pad_token_id=0
        )[0, len(prompt) :]
        found = [step.token_id for step in engine.generate(prompt, max_new_tokens=ORIGINAL - len(prompt))]
    assert found == expected.tolist()


@pytest.mark.parametrize("prompt", [8, 40])
def test_a_longer_context_takes_the_long_form_throughout(folder: Path, bundle: Path, prompt: int) -> None:
    """This holds for a text longer than the original context, also if decoding passes that length."""
    expected = logits_of(oracle(folder, is_long=True), TOKENS)
    assert differ(decoded(bundle, WHOLE, TOKENS, prompt), expected) <= TOLERANCE
    # A short text in a long context differs from transformers: cached keys cannot be rotated again later.
    short = TOKENS[:ORIGINAL]
    assert differ(decoded(bundle, WHOLE, short, prompt), logits_of(oracle(folder), short)) > 10 * TOLERANCE


def test_transformers_forgets_the_long_frequencies(folder: Path) -> None:
    """If this fails, remove `is_long` above, and correct compiler/families/longrope.py."""
    asked, told = (logits_of(oracle(folder, is_long), TOKENS) for is_long in (False, True))
    assert differ(asked, told) > 10 * TOLERANCE
