"""Devices for the tests of this folder: torch's CPU, and a GPU where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moec.runtime.accelerator.device import COPY_SLOTS
from moec.runtime.accelerator.image import entry_bytes
from moec.runtime.accelerator.placement import working_bytes
from moec.runtime.bundle.open_bundle import open_bundle
from tests.runtime.conftest import tiny_bundle as tiny_bundle
from tests.runtime.modes.conftest import two_version_bundle as two_version_bundle

NO_GPU = "NOT RUN: no CUDA device here"


@pytest.fixture(params=["torch-cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each torch device that the accelerator runs on."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip(NO_GPU)
        return torch.device("cuda", 0)
    return torch.device("cpu")


def name_of(device: torch.device) -> str:
    return "torch-cpu" if device.type == "cpu" else "cuda"


def memory_for(bundle: Path, share: float, tokens: int, may_group: bool | None = None) -> int:
    """Return the memory of a device for a share of the experts and passes of this many tokens, bytes.

    may_group: as in `working_bytes`; None: if there is a GPU.
    """
    manifest = open_bundle(bundle).manifest
    sizes = [entry_bytes(manifest.model, entry) for entry in manifest.stored_experts]
    high = sum(sizes[: len(manifest.experts)])
    groups = torch.cuda.is_available() if may_group is None else may_group
    return working_bytes(manifest, tokens, groups) + COPY_SLOTS * max(sizes) + int(high * share)
