"""Devices for the tests of this folder: torch's CPU, and a GPU where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gates.bundles import emit_bundle
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

NO_GPU = "NOT RUN: no CUDA device here"


@pytest.fixture(params=["torch-cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each torch device that the accelerator runs on."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip(NO_GPU)
        return torch.device("cuda", 0)
    return torch.device("cpu")


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of six experts, formats mixed; read only."""
    root = tmp_path_factory.mktemp("accelerator")
    folder = save_tiny_mixtral(root / "model", TinyMixtral(layers=3, experts=6, top_k=2, seed=5))
    return emit_bundle(folder, root / "bundle", mixed=True)
