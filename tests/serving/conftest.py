"""A tiny bundle for the tests of serving."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of six experts, formats mixed; read only."""
    import torch

    from tests.gates.bundles import emit_bundle
    from tests.tiny_models import TinyMixtral, save_tiny_mixtral

    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("served")
    folder = save_tiny_mixtral(root / "model", TinyMixtral(layers=3, experts=6, top_k=2, seed=5))
    return emit_bundle(folder, root / "bundle", mixed=True)
