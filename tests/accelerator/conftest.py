"""Devices for the tests of this folder: torch's CPU, and a GPU where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moec.runtime.accelerator.device import COPY_SLOTS
from moec.runtime.accelerator.image import entry_bytes
from moec.runtime.accelerator.placement import working_bytes
from moec.runtime.bundle.open_bundle import open_bundle
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


@pytest.fixture(scope="session")
def two_version_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of eight experts, four per token; 8 bits, low versions of 2; read only."""
    root = tmp_path_factory.mktemp("versions")
    folder = save_tiny_mixtral(root / "model", TinyMixtral(layers=3, experts=8, top_k=4, seed=5))
    return emit_bundle(folder, root / "bundle", bitwidth=8, low="q2g32")


def memory_for(bundle: Path, share: float, tokens: int, may_group: bool | None = None) -> int:
    """Return the memory of a device for a share of the experts and passes of this many tokens, bytes.

    may_group: as in `working_bytes`; None: if there is a GPU.
    """
    manifest = open_bundle(bundle).manifest
    sizes = [entry_bytes(manifest.model, entry) for entry in manifest.stored_experts]
    high = sum(sizes[: len(manifest.experts)])
    groups = torch.cuda.is_available() if may_group is None else may_group
    return working_bytes(manifest, tokens, groups) + COPY_SLOTS * max(sizes) + int(high * share)
