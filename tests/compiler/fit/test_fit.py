"""What a model is and needs, from its config.json alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moec.compiler.families import describe
from moec.compiler.fit.config_file import ConfigFile, open_config
from moec.compiler.fit.estimate import count_parameters, estimate
from moec.compiler.fit.routing import COMMON_SHARE, popularity
from moec.manifests.errors import CheckpointError, MoecError
from moec.manifests.model import ModelSpec
from moec.profiles.loading import load_profile
from moec.profiles.predict import expected_misses
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.memory.budget import nominal_memory
from tests.compiler.lowered import lowered, save_family
from tests.gates.bundles import emit_bundle
from tests.tiny_families import CHOSEN

PUBLISHED: list[dict[str, Any]] = json.loads(
    Path(__file__).parents[1].joinpath("families", "published_configs.json").read_text(encoding="utf-8")
)
LAPTOP = load_profile("laptop")


def saved(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def described(folder: Path, config: dict[str, Any]) -> tuple[ModelSpec, ConfigFile]:
    files = open_config(str(saved(folder, config)))
    return describe(files), files


@pytest.mark.parametrize("number", range(len(PUBLISHED)), ids=[each["checkpoint"] for each in PUBLISHED])
def test_weights_of_published_models_are_counted(number: int, tmp_path: Path) -> None:
    published = PUBLISHED[number]
    model, _ = described(tmp_path / "model", published["config"])
    counts = count_parameters(model)
    total = (counts.routed + counts.dense) / 1e9
    assert total == pytest.approx(published["billion_weights"], rel=published.get("tolerance", 0.02))
    assert counts.experts == sum(layer.experts.count for layer in model.layers)
    assert 0 < counts.routed_per_token < counts.routed


@pytest.mark.oracle
@pytest.mark.parametrize("family", sorted(CHOSEN))
def test_a_config_alone_describes_the_model_that_a_compile_reads(family: str, tmp_path: Path) -> None:
    folder = save_family(CHOSEN[family], tmp_path / "model")
    expected = lowered(folder).model
    found = describe(open_config(str(folder)))
    assert found.dense_shapes() == expected.dense_shapes()
    assert found.format_version == expected.format_version
    for layer, other in zip(found.layers, expected.layers, strict=True):
        # Numbers that stand in tensors, and frequencies that transformers computes, are not in config.json.
        assert replace(layer.experts, router=other.experts.router) == other.experts
        assert layer.shared == other.shared and (layer.recurrent is None) == (other.recurrent is None)
        assert layer.mixer_shapes(found.hidden_size) == other.mixer_shapes(found.hidden_size)


def test_needed_memory_is_that_of_a_run(tmp_path: Path) -> None:
    folder = save_family(CHOSEN["qwen3_moe"], tmp_path / "model")
    bundle = emit_bundle(folder, tmp_path / "bundle")
    files = open_config(str(folder))
    model = describe(files)
    (row,) = estimate(model, files, model.default_context, [LAPTOP], bits=[16])
    with open_bundle(bundle) as opened:
        floor, cost = nominal_memory(opened.manifest).floor_bytes, opened.manifest.cost
    assert row.outlooks[0].needed_bytes == pytest.approx(floor, rel=0.02)
    assert row.disk_bytes == pytest.approx(cost.dense_packed_bytes + cost.expert_padded_bytes, rel=0.05)


def missed_share(count: int, top_k: int, held_share: float) -> float:
    experts = [(1, share) for share in popularity(count, top_k, COMMON_SHARE)]
    return expected_misses(experts, round(held_share * count))[0]


def test_a_cache_misses_as_much_as_on_the_yardstick() -> None:
    for held, measured in ((0.75, 0.053), (0.5, 0.21), (0.25, 0.44)):  # MiB read per token over MiB of its experts
        assert missed_share(64, 8, held) == pytest.approx(measured, abs=0.03)


@pytest.mark.parametrize(("count", "top_k"), [(8, 2), (64, 8), (256, 8), (4, 4)])
def test_popular_experts_come_first(count: int, top_k: int) -> None:
    shares = popularity(count, top_k, COMMON_SHARE)
    assert len(shares) == count and sum(shares) == pytest.approx(1)
    assert list(shares) == sorted(shares, reverse=True)
    assert missed_share(count, top_k, 0.5) <= 0.5 + 1e-9, "no worse than chance"


def test_a_range_holds_the_usual_rate_and_ends_in_memory(tmp_path: Path) -> None:
    config = next(each["config"] for each in PUBLISHED if each["checkpoint"] == "Qwen/Qwen3-30B-A3B")
    model, files = described(tmp_path / "model", config)
    machines = [replace(LAPTOP, memory_budget_bytes=size << 30) for size in (1, 4, 8, 64)]
    for row in estimate(model, files, 4096, machines):
        small, *others, all_held = row.outlooks
        assert small.tokens_per_s is None and small.needed_bytes > 1 << 30
        rates = [(each.slowest, each.tokens_per_s, each.fastest) for each in (*others, all_held)]
        assert all(None not in three and list(three) == sorted(three) for three in rates)  # type: ignore[type-var]
        assert all_held.slowest == all_held.fastest and all_held.hit_rate == 1 and all_held.held_share == 1
        assert others[0].tokens_per_s is not None and others[1].tokens_per_s is not None
        assert others[0].tokens_per_s < others[1].tokens_per_s


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama", "hidden_size": 64}, "is a dense model"),
        ({"model_type": "brand_new_moe", "num_experts": 4}, "model family `brand_new_moe` is unknown"),
        ({"num_experts": 4}, "has no `model_type`"),
        ({"model_type": "qwen3_moe", "num_experts": 4}, "key `hidden_size`: expected a whole number"),
        ([], "expected a JSON object"),
    ],
)
def test_what_cannot_be_answered_says_why(config: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        described(tmp_path / "model", config)
    assert said in refused.value.message and refused.value.hint


def test_a_place_without_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    for place, said in (
        (tmp_path, "no `config.json`"),
        (tmp_path / "file", "is a file, expected a model folder"),
        (tmp_path / "absent", "no folder"),
        ("a" * 5000, "cannot open"),
    ):
        with pytest.raises(MoecError) as refused:
            open_config(str(place))
        assert said in refused.value.message and refused.value.hint


def test_the_size_on_disk_is_that_of_the_index_or_of_the_files(tmp_path: Path) -> None:
    config = PUBLISHED[0]["config"]
    folder = saved(tmp_path / "model", config)
    assert open_config(str(folder)).stored_bytes is None
    (folder / "model.safetensors").write_bytes(b"x" * 300)
    assert open_config(str(folder)).stored_bytes == 300
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 12345}}))
    assert open_config(str(folder)).stored_bytes == 12345
    for broken in ({"metadata": {"total_size": "many"}}, {"metadata": 3}, {}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(broken))
        assert open_config(str(folder)).stored_bytes == 300


def test_the_text_part_of_a_model_that_sees_is_described(tmp_path: Path) -> None:
    text = next(each["config"] for each in PUBLISHED if each["checkpoint"] == "Qwen/Qwen3-30B-A3B")
    model, _ = described(tmp_path / "model", {"model_type": "seeing", "text_config": text, "vision_config": {}})
    assert model.family == "qwen3_moe"
