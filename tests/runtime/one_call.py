"""A bundle whose passes take one call a layer, the two ways to decode it, and which layers took one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.runtime import Engine, kernels
from tests.gates.bundles import emit_bundle
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

LAYERS, EXPERTS, TOP_K = 3, 12, 3


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("token")
    shape = TinyMixtral(layers=LAYERS, experts=EXPERTS, top_k=TOP_K, seed=7)
    return emit_bundle(save_tiny_mixtral(root / "model", shape), root / "bundle", mixed=True)


def steps_only(engine: Engine) -> None:
    """Leave this engine the steps that are called one by one."""
    engine.model.pass_experts = None


def in_one_call(engine: Engine) -> None:
    """Leave it as it is."""
    assert engine.model.pass_experts is not None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that went in one call."""
    layers, one_call = list[int](), kernels.experts_layer

    def counted(native: Any, layer: int, hidden: np.ndarray, sequences: int) -> Any:
        layers.append(layer)
        return one_call(native, layer, hidden, sequences)

    monkeypatch.setattr(kernels, "experts_layer", counted)
    return layers
