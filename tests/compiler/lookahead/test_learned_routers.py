"""Learned routers: what the maps learn, keep and round, and what a compile writes and reports."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moec.cli.measuring.text_engines import BundleEngine
from moec.compiler import linear_maps
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
from moec.compiler.request.options import Talk
from moec.compiler.stages import learning as stage
from moec.manifests.bundle import LOOKAHEAD_NAME
from moec.manifests.model import ExpertKey, ModelSpec, StaticRouting
from moec.runtime import load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.layers.routing import RoutingRule
from moec.runtime.prefetch.learned_routers import read_lookahead
from tests.compiler.lowered import lowered
from tests.tiny_compile import compile_tiny, save_model, save_texts
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

TEXTS, LENGTH, TOP_K = 40, 32, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = save_tiny_mixtral(tmp_path_factory.mktemp("model"), TinyMixtral(layers=3, experts=8, top_k=TOP_K))
    return lowered(folder).model


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
    return learn_maps(model, samples_of(model, noise, foresight), model.expert_layers, ())


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
    blind = learn_maps(model, samples, [0], ())[0]
    found = learn_maps(model, samples, [0], [ExpertKey(1, 0), ExpertKey(1, 1)])[0]
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
    assert learn_maps(model, few, model.expert_layers, ()) == []
    assert learn_maps(model, {layer: RoutingSample() for layer in samples}, model.expert_layers, ()) == []


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


def routed_by(model: ModelSpec, **router: Any) -> ModelSpec:
    """Return the model with other routers."""
    layers = []
    for layer in model.layers:
        experts = replace(layer.experts, router=replace(layer.experts.router, **router))
        layers.append(replace(layer, experts=experts))
    return replace(model, layers=tuple(layers))


CORRECTION = tuple(3.0 if expert == 5 else 0.0 for expert in range(8))


@pytest.mark.parametrize(
    "router",
    [
        {"scoring": "sigmoid"},
        {"scoring": "sigmoid", "correction": CORRECTION},
        {"scoring": "sigmoid", "correction": CORRECTION, "corrects_logits": True},
        {"scoring": "softmax", "correction": CORRECTION},
        {"scoring": "sigmoid", "groups": 4, "kept_groups": 1, "group_score": "top2"},
        {"scoring": "softmax", "groups": 4, "kept_groups": 1, "group_score": "max"},
        {"scoring": "sparsemixer", "renormalize": False, "margin": 0.1},
    ],
    ids=str,
)
def test_choices_follow_the_rule_of_the_router(model: ModelSpec, router: dict[str, Any]) -> None:
    """The runtime's rule says what tokens choose."""
    routed = routed_by(model, **router)
    samples = samples_of(model, noise=0.1, foresight=0.0)
    for layer in range(1, 3):
        rule = RoutingRule(routed.layers[layer].experts)
        for logits, chosen in zip(samples[layer].logits, samples[layer].chosen, strict=True):
            chosen.copy_(torch.from_numpy(rule.route(logits.numpy())[0]))
    found = learn_maps(routed, samples, model.expert_layers, ())
    assert [(each.layer, each.ahead) for each in found] == [(0, 1), (0, 2), (1, 1)]
    assert all(each.recall > 0.9 for each in found)


def test_decoders_of_several_routed_layers_learn(model: ModelSpec, tmp_path: Path) -> None:
    assert can_learn(model) and can_learn(routed_by(model, scoring="sigmoid", correction=CORRECTION))
    static = StaticRouting(tuple(range(TOP_K)) * model.vocab_size)
    assert not can_learn(routed_by(model, static=static))
    one = save_tiny_mixtral(tmp_path / "one", TinyMixtral(layers=1, experts=3, top_k=1))
    assert not can_learn(lowered(one).model)


def test_groups_of_layers_teach_the_same(model: ModelSpec) -> None:
    samples = samples_of(model, noise=0.1, foresight=0.0)
    together = encode_maps(learn_maps(model, samples, model.expert_layers, ()))
    apart = [each for layer in model.expert_layers for each in learn_maps(model, samples, [layer], ())]
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
    assert {each.layer for each in learn_maps(model, samples, model.expert_layers, ())} == {1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("learning") / "tiny", layers=3, experts=4)


def options(folder: Path, train: int) -> dict[str, Any]:
    return {"data": str(save_texts(folder / "texts", train=train)), "tasks": ("perplexity",)}


def test_a_compile_writes_what_it_learned(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights may teach nothing, so every map is kept here. With little memory the bytes are the same."""
    monkeypatch.setattr(linear_maps, "ONE_SIDED_95", -1e9)
    quality = compile_tiny(checkpoint, tmp_path / "out", "uniform", 4, **options(tmp_path, 10)).quality
    rows = quality["lookahead"]["rows"]
    assert [(row["ahead"], row["layers"]) for row in rows] == [(1, [0, 1]), (2, [0])]
    with open_bundle(tmp_path / "out") as bundle:
        assert list(read_lookahead(bundle)) == [(0, 1), (0, 2), (1, 1)]
    data = (tmp_path / "out" / LOOKAHEAD_NAME).read_bytes()
    assert len(data) == quality["lookahead"]["size_bytes"]
    assert json.loads((tmp_path / "out" / "quality.json").read_text())["lookahead"] == quality["lookahead"]
    monkeypatch.setattr(stage, "SAMPLE_SHARE", 1 << 60)
    compile_tiny(checkpoint, tmp_path / "little", "uniform", 4, **options(tmp_path / "again", 10))
    assert (tmp_path / "little" / LOOKAHEAD_NAME).read_bytes() == data


def test_few_texts_are_told(checkpoint: Path, tmp_path: Path) -> None:
    notes = list[str]()
    result = compile_tiny(checkpoint, tmp_path / "out", "uniform", 4, talk=Talk(notes.append), **options(tmp_path, 4))
    assert "lookahead" not in result.quality and not (tmp_path / "out" / LOOKAHEAD_NAME).exists()
    assert "no routers are learned: they need 5 train texts of 2 tokens, found 4" in notes


def test_the_record_is_that_of_the_routers(checkpoint: Path, tmp_path: Path) -> None:
    texts = [[1, 5, 9, 3, 7], [2, 8]]
    compile_tiny(checkpoint, tmp_path / "out", "uniform", 8)
    with load(tmp_path / "out", expert_cache="50%", context=64) as engine:
        records = list(BundleEngine(engine).recorded_routing(texts))
        norms, routers = engine.model.router_norms(), engine.model.routers()
        assert [len(record[0].inputs) for record in records] == [5, 2]
        for layer, router in enumerate(routers):
            assert router is not None
            own = records[0][layer]
            assert np.array_equal(own.logits, router.logits(own.inputs))
            assert np.array_equal(
                np.sort(own.chosen), np.sort(np.argsort(-own.logits, axis=1)[:, : own.chosen.shape[1]])
            )
            assert sorted(own.foreseen) == [ahead for ahead in (1, 2, 3) if layer + ahead < len(routers)]
        # A stream that two norms read differs by their weights alone.
        scaled = records[0][0].inputs / norms[0].weight * norms[1].weight
        following = routers[1]
        assert following is not None
        assert records[0][0].foreseen[1] == pytest.approx(
            following.logits(scaled.astype(np.float32)), rel=1e-3, abs=1e-3
        )
        assert engine.model.advisor.rule == "likely" and engine.model.advisor.predictor is not None


@dataclass
class Encoder:
    """Gives each text as many tokens as it has characters."""

    def encode_pairs(self, pairs: list[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        return [([1] * len(prompt), [2] * len(answer)) for prompt, answer in pairs]


def test_texts_of_all_tasks_in_turn_up_to_a_pass_each(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"a": [("x" * 5000, ""), ("y" * 3, "z"), ("", "")], "b": [("p", "q")]}
    monkeypatch.setattr(stage, "train_texts", lambda split, shots: texts[split])
    monkeypatch.setattr(stage, "MAX_TOKENS", 1027)

    class Prepared:
        splits, shots = ("a", "b"), None

        class lowering:  # noqa: N801
            class model:  # noqa: N801
                default_context = 4096

    found = stage.sample_texts(Prepared(), Encoder().encode_pairs)  # type: ignore[arg-type]
    assert [len(tokens) for tokens in found] == [1024, 2]
    monkeypatch.setattr(stage, "MAX_TOKENS", 5000)
    assert [len(tokens) for tokens in stage.sample_texts(Prepared(), Encoder().encode_pairs)] == [1024, 2, 4]  # type: ignore[arg-type]
