"""Maps that foresee later layers: what is learned, kept and rounded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moec.compiler.checkpoint.checkpoint import open_checkpoint
from moec.compiler.families import lower
from moec.compiler.linear_maps import (
    HELD_OUT,
    LearnedMap,
    RoutingSample,
    can_learn,
    encode_maps,
    layer_groups,
    learn_maps,
    lookahead_report,
)
from moec.manifests.model import ExpertKey, ModelSpec
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

TEXTS, LENGTH, TOP_K = 40, 32, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = save_tiny_mixtral(tmp_path_factory.mktemp("model"), TinyMixtral(layers=3, experts=8, top_k=TOP_K))
    return lower(open_checkpoint(str(folder))).model


@dataclass(frozen=True)
class Record:
    inputs: np.ndarray
    logits: np.ndarray
    chosen: np.ndarray
    foreseen: dict[int, np.ndarray]


def samples_of(model: ModelSpec, noise: float, foresight: float) -> dict[int, RoutingSample]:
    """Return routing in which later logits are linear in earlier inputs, with noise.

    foresight: 0: the later routers foresee at random; 1: they foresee what comes.
    """
    drawn = np.random.default_rng(0)
    count, size = model.layers[0].experts.count, model.hidden_size
    maps = [drawn.standard_normal((size, count)) for _ in model.layers]
    samples = {layer: RoutingSample() for layer in model.expert_layers}
    for _ in range(TEXTS):
        inputs = drawn.standard_normal((LENGTH, size)).astype(np.float32)
        logits = [inputs @ each + noise * drawn.standard_normal((LENGTH, count)) for each in maps]
        for layer in model.expert_layers:
            chosen = np.argsort(-logits[layer], axis=1)[:, :TOP_K].astype(np.int32)
            foreseen = {
                ahead: (foresight * logits[layer + ahead] + (1 - foresight) * drawn.standard_normal((LENGTH, count)))
                for ahead in (1, 2, 3)
                if layer + ahead < model.num_layers
            }
            samples[layer].add(Record(inputs, logits[layer].astype(np.float32), chosen, foreseen))
    return samples


def learned(model: ModelSpec, noise: float = 0.1, foresight: float = 0.0) -> list[LearnedMap]:
    """Return the maps of all layers."""
    return learn_maps(samples_of(model, noise, foresight), model.expert_layers, ())


def test_what_is_linear_is_learned(model: ModelSpec) -> None:
    found = learned(model)
    assert [(each.layer, each.ahead) for each in found] == [(0, 1), (0, 2), (1, 1)]
    for each in found:
        assert each.recall > 0.9 and each.own_recall < 0.4
        assert each.data.size == each.spec.packed_bytes(len(each.bias), model.hidden_size)


def test_what_the_later_router_foresees_is_not_learned(model: ModelSpec) -> None:
    assert learned(model, foresight=1.0) == []


def test_experts_that_are_left_out_are_not_foreseen(model: ModelSpec) -> None:
    """Their logits are the highest, but no token chooses them."""
    samples = samples_of(model, noise=0.1, foresight=0.0)
    for logits, chosen in zip(samples[1].logits, samples[1].chosen, strict=True):
        chosen.copy_(logits[:, 2:].topk(TOP_K, dim=1).indices + 2)
    blind = learn_maps(samples, [0], ())[0]
    found = learn_maps(samples, [0], [ExpertKey(1, 0), ExpertKey(1, 1)])[0]
    assert (found.layer, found.ahead) == (blind.layer, blind.ahead) == (0, 1)
    assert found.recall > 0.9 > blind.recall


def test_noise_is_not_learned(model: ModelSpec) -> None:
    """A map that is as good as chance is kept only by chance, which one in twenty is."""
    assert len(learned(model, noise=1e6)) <= 1


def test_too_few_texts_teach_nothing(model: ModelSpec) -> None:
    samples = samples_of(model, noise=0.1, foresight=0.0)
    few = {
        layer: replace(
            own,
            inputs=own.inputs[: HELD_OUT - 1],
            logits=own.logits[: HELD_OUT - 1],
            chosen=own.chosen[: HELD_OUT - 1],
            foreseen={ahead: texts[: HELD_OUT - 1] for ahead, texts in own.foreseen.items()},
        )
        for layer, own in samples.items()
    }
    assert learn_maps(few, model.expert_layers, ()) == []
    assert learn_maps({layer: RoutingSample() for layer in samples}, model.expert_layers, ()) == []


def test_equal_samples_give_equal_bytes(model: ModelSpec) -> None:
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(encode_maps(learned(model)))
    torch.set_num_threads(before)
    assert found[0] == found[1]


def test_the_report_has_means_by_distance(model: ModelSpec) -> None:
    (first, *_) = learned(model)
    maps: list[LearnedMap] = [replace(first, recall=0.8), replace(first, layer=1, recall=0.6, own_recall=0.5)]
    report = lookahead_report(maps, 7)
    (row,) = report["rows"]
    assert report["size_bytes"] == 7 and row["ahead"] == 1 and row["layers"] == [0, 1]
    assert row["recall"] == pytest.approx(0.7) and row["own_recall"] == pytest.approx((first.own_recall + 0.5) / 2)


def test_only_softmax_routers_of_decoders_learn(model: ModelSpec, tmp_path: Path) -> None:
    layer = model.layers[1]
    router = replace(layer.experts.router, scoring="sigmoid")
    other = replace(layer, experts=replace(layer.experts, router=router))
    assert can_learn(model)
    assert not can_learn(replace(model, layers=(model.layers[0], other, model.layers[2])))
    one = save_tiny_mixtral(tmp_path / "one", TinyMixtral(layers=1, experts=3, top_k=1))
    assert not can_learn(lower(open_checkpoint(str(one))).model)


def test_groups_of_layers_teach_the_same(model: ModelSpec) -> None:
    samples = samples_of(model, noise=0.1, foresight=0.0)
    together = encode_maps(learn_maps(samples, model.expert_layers, ()))
    apart = [each for layer in model.expert_layers for each in learn_maps(samples, [layer], ())]
    assert encode_maps(apart) == together


def test_groups_fit_into_memory(model: ModelSpec) -> None:
    """A token takes 2 bytes per input, 16 per expert and 8 per choice in each layer."""
    bytes_of_layer = 10 * (2 * model.hidden_size + 16 * 8 + 8 * TOP_K)
    assert layer_groups(model, 10, 6 * bytes_of_layer) == [(0, 1, 2)]
    assert layer_groups(model, 10, 5 * bytes_of_layer) == [(0, 1), (2,)]
    assert layer_groups(model, 10, 0) == [(0,), (1,), (2,)]


def test_inputs_beyond_float16_teach_nothing(model: ModelSpec) -> None:
    samples = samples_of(model, noise=0.1, foresight=0.0)
    samples[0].inputs[0][0, 0] = torch.inf
    assert {each.layer for each in learn_maps(samples, model.expert_layers, ())} == {1}
