"""A bundle whose experts have low versions, and a run of forced tokens under any modes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.runtime import load
from moec.runtime.modes.mode_counts import ModeCounts

TOKENS = np.random.default_rng(3).integers(4, 260, 40).tolist()
PROMPT_TOKENS = 20


@pytest.fixture(scope="session")
def two_version_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of eight experts, four per token; 8 bits, low versions of 2; read only."""
    import torch

    from tests.gates.bundles import emit_bundle
    from tests.tiny_models import TinyMixtral, save_tiny_mixtral

    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("versions")
    folder = save_tiny_mixtral(root / "model", TinyMixtral(layers=3, experts=8, top_k=4, seed=5))
    return emit_bundle(folder, root / "bundle", bitwidth=8, low="q2g32")


def forced_steps(path: Path, **options: Any) -> tuple[np.ndarray, ModeCounts | None]:
    """Return the logits of forced decode steps after a prompt, and the decisions of the modes."""
    with load(path, context=64, **options) as engine:
        engine.cache.finish_warming()
        engine.begin_sequence()
        engine.prefill(TOKENS[:PROMPT_TOKENS])
        rows = [engine.decode([TOKENS[at]], [0], [at]) for at in range(PROMPT_TOKENS, len(TOKENS))]
        engine.cache.check_invariants()
        return np.concatenate(rows), engine.mode_counts


@pytest.fixture
def decoded(two_version_bundle: Path) -> Callable[..., tuple[np.ndarray, ModeCounts | None]]:
    return partial(forced_steps, two_version_bundle)
