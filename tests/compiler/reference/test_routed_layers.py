"""The experts' own forward pass, next to that of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moec.compiler.reference.routed_layers import sorted_experts
from moec.compiler.walker.loaded_layer import LoadedLayer
from tests.compiler.configured import lowered
from tests.tiny_models import TINY_MODELS, save_tiny_mixtral

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["plain", "top1", "sharded-half", "window-heads"])
def test_sorted_experts_compute_what_transformers_computes(name: str, tmp_path: Path) -> None:
    slot = LoadedLayer(lowered(save_tiny_mixtral(tmp_path / name, TINY_MODELS[name])))
    slot.load(0)
    module, generator = slot.experts, torch.Generator().manual_seed(0)
    hidden = torch.randn(37, slot.model.hidden_size, generator=generator)
    top_k = slot.model.layers[0].experts.top_k
    index = torch.rand(37, module.num_experts, generator=generator).topk(top_k).indices
    index[:, 0].clamp_(max=1)  # leaves some experts with few tokens or none
    weights = torch.rand(37, top_k, generator=generator)
    expected = type(module).forward.__wrapped__(module, hidden, index, weights)
    torch.testing.assert_close(sorted_experts(module, hidden, index, weights), expected, atol=1e-5, rtol=1e-5)
    assert slot.single.model.config._experts_implementation == "moec_sorted"
