"""What a compile learns of the routers of its bundle: the file, the report, the texts, and what the runtime records."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.cli.measuring.text_engines import BundleEngine
from moec.compiler import linear_maps
from moec.compiler.request.options import Talk
from moec.compiler.stages import learning as stage
from moec.manifests.bundle import LOOKAHEAD_NAME
from moec.runtime import load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.prefetch.learned_routers import read_lookahead
from tests.tiny_compile import compile_tiny, save_model, save_texts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("learning") / "tiny", layers=3, experts=4)


def options(folder: Path, train: int) -> dict[str, Any]:
    return {"data": str(save_texts(folder / "texts", train=train)), "tasks": ("perplexity",)}


def test_a_compile_writes_what_it_learned(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights may teach nothing, so every map is kept here. With little memory the bytes are the same."""
    monkeypatch.setattr(linear_maps, "ONE_SIDED_95", -1e9)
    quality = compile_tiny(model, tmp_path / "out", "uniform", 4, **options(tmp_path, 10)).quality
    rows = quality["lookahead"]["rows"]
    assert [(row["ahead"], row["layers"]) for row in rows] == [(1, [0, 1]), (2, [0])]
    with open_bundle(tmp_path / "out") as bundle:
        assert list(read_lookahead(bundle)) == [(0, 1), (0, 2), (1, 1)]
    data = (tmp_path / "out" / LOOKAHEAD_NAME).read_bytes()
    assert len(data) == quality["lookahead"]["size_bytes"]
    assert json.loads((tmp_path / "out" / "quality.json").read_text())["lookahead"] == quality["lookahead"]
    monkeypatch.setattr(stage, "SAMPLE_SHARE", 1 << 60)
    compile_tiny(model, tmp_path / "little", "uniform", 4, **options(tmp_path / "again", 10))
    assert (tmp_path / "little" / LOOKAHEAD_NAME).read_bytes() == data


def test_few_texts_are_told(model: Path, tmp_path: Path) -> None:
    notes = list[str]()
    result = compile_tiny(model, tmp_path / "out", "uniform", 4, talk=Talk(notes.append), **options(tmp_path, 4))
    assert "lookahead" not in result.quality and not (tmp_path / "out" / LOOKAHEAD_NAME).exists()
    assert "no routers are learned: they need 5 train texts of 2 tokens, found 4" in notes


def test_the_record_is_that_of_the_routers(model: Path, tmp_path: Path) -> None:
    texts = [[1, 5, 9, 3, 7], [2, 8]]
    compile_tiny(model, tmp_path / "out", "uniform", 8)
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
