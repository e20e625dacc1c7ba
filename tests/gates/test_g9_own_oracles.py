"""G9 without a model of transformers: a 16-bit bundle computes the published definition.

The oracle is tests/oracles/models.py. docs/families.md says what it can and cannot show.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moec.runtime import load
from tests.compiler.lowered import lowered, walked_logits
from tests.gates.bundles import emit_bundle
from tests.oracles.checkpoints import OWN_FAMILIES, save_own_family
from tests.oracles.models import load_oracle
from tests.tiny_models import VOCABULARY

pytestmark = pytest.mark.oracle

PROMPT_TOKENS, DECODE_STEPS = 40, 32
TOLERANCE = 1e-3  # of the largest logit
END = 2


@pytest.fixture(scope="module", params=list(OWN_FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    save_own_family(root / "model", OWN_FAMILIES[request.param])
    emit_bundle(root / "model", root / "bundle")
    return root


@pytest.mark.gate("G9")
def test_logits_equal_the_published_definition(folder: Path) -> None:
    tokens = np.random.default_rng(7).integers(0, VOCABULARY, PROMPT_TOKENS + DECODE_STEPS).tolist()
    expected = load_oracle(folder / "model")(torch.tensor([tokens]))[0].numpy()
    with load(folder / "bundle", expert_cache="100%", context=128) as engine:
        rows = [engine.logits(tokens[:PROMPT_TOKENS])]
        for position in range(PROMPT_TOKENS, len(tokens)):
            rows.append(engine.model.logits(engine.step([tokens[position]], [0], [position])))
    assert np.abs(np.concatenate(rows) - expected).max() <= TOLERANCE * np.abs(expected).max()
    # The compile measures on layers of a stand-in of transformers, which are compared in the same way.
    found = walked_logits(lowered(folder / "model"), [tokens])[0].numpy()
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.gate("G9")
def test_greedy_continuations_equal_the_published_definition(folder: Path) -> None:
    prompt = np.random.default_rng(4).integers(4, 260, 7).tolist()
    expected = load_oracle(folder / "model").greedy(prompt, DECODE_STEPS, END)
    with load(folder / "bundle", expert_cache="100%", context=128) as engine:
        found = [step.token_id for step in engine.generate(prompt, max_new_tokens=DECODE_STEPS)]
    assert found == expected
