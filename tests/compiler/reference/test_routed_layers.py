"""The experts' own forward pass next to that of transformers, and routers whose scores tie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moec.compiler.reference.routed_layers import sorted_experts
from moec.compiler.reference.routers import FirstOfEqual
from moec.compiler.walker.loaded_layer import LoadedLayer
from tests.compiler.lowered import lowered
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
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


FAMILIES = ("qwen2", "deepseek-v2-groups-yarn", "deepseek-v3", "glm4", "ernie", "granite", "gpt-oss", "phimoe")


def _chosen(slot: LoadedLayer) -> torch.Tensor:
    """Return the experts that a layer with an all-zero router chooses, by token."""
    caught = list[torch.Tensor]()
    handle = slot.experts.register_forward_pre_hook(lambda module, given: caught.append(given[1].clone()))
    with torch.inference_mode():
        slot.single(torch.randn(1, 5, slot.model.hidden_size, generator=torch.Generator().manual_seed(0)))
    handle.remove()
    return caught[0]


@pytest.mark.parametrize("name", ["mixtral", *FAMILIES])
def test_an_all_zero_router_takes_the_first_experts(name: str, tmp_path: Path) -> None:
    if name == "mixtral":
        path = save_tiny_mixtral(tmp_path / name, TINY_MODELS["plain"])
    else:
        path = save_tiny_family(tmp_path / name, TINY_FAMILIES[name])
    slot = LoadedLayer(lowered(path))
    layer = slot.model.expert_layers[0]
    slot.load(layer)
    for parameter, value in slot.single.model.named_parameters():
        if parameter.endswith(("gate.weight", "router.weight", "router.bias")) and "shared" not in parameter:
            value.data.zero_()
    for buffer, value in slot.single.model.named_buffers():
        if buffer.endswith("e_score_correction_bias"):
            value.zero_()
    for parameter, value in slot.single.model.named_parameters():
        if parameter.endswith("e_score_correction_bias"):
            value.data.zero_()
    top_k = slot.model.layers[layer].experts.top_k
    assert _chosen(slot).sort(-1).values.tolist() == [list(range(top_k))] * 5


def test_rows_without_a_tie_are_unchanged() -> None:
    scores = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    plain = scores.topk(4, dim=-1)
    with FirstOfEqual():
        found = scores.topk(4, dim=-1)
    assert torch.equal(found.indices, plain.indices) and torch.equal(found.values, plain.values)


def test_a_tie_at_the_end_takes_the_first_and_has_gradients() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0], [5.0, 4.0, 3.0, 2.0, 1.0]], requires_grad=True)
    with FirstOfEqual():
        values, indices = torch.topk(scores, 2, dim=-1)
    assert indices.tolist() == [[1, 2], [0, 1]]
    values.sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
