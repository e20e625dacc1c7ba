"""Files of llama.cpp's own converter: settings and every weight are those of the folder that they came from."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from moec.compiler.checkpoint.gguf.names import NAMES
from moec.compiler.checkpoint.gguf.open_gguf import open_gguf
from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.families import lower
from moec.manifests.model import LayerSpec
from tests.compiler.checkpoint.test_mxfp4 import pack_experts
from tests.oracles.checkpoints import OWN_FAMILIES, save_own_family
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.tiny_models import save_tiny_mixtral, save_tiny_olmoe, save_tiny_qwen3_moe

# By architecture. Only what a file can say: the limit of gpt-oss, for one, is fixed in llama.cpp.
FAMILIES = {
    "afmoe": ("afmoe-of-four",),
    "deepseek2": ("deepseek-v2-groups-yarn", "deepseek-v3-yarn", "glm4-lite"),
    "dots1": ("dots1",),
    "ernie4_5-moe": ("ernie",),
    "exaone-moe": ("exaone-listed",),
    "gemma4": ("gemma4",),
    "glm4moe": ("glm4-bias", "solar-whole"),
    "gpt-oss": ("gpt-oss-yarn-shards",),
    "granitemoe": ("granite-scaled", "granite-shared"),
    "hy_v3": ("hy3-bias",),
    "laguna": ("laguna", "laguna-whole"),
    "lfm2moe": ("lfm2",),
    "mellum": ("mellum",),
    "minimax-m2": ("minimax-m2",),
    "qwen2moe": ("qwen2",),
    "qwen35moe": ("qwen3.5",),
    "qwen3next": ("qwen3-next",),
}
# What published checkpoints have, and the converter takes for granted.
WHOLE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
OWN = {
    name: replace(family, config={**family.config, **change})
    for name, family, change in (
        ("afmoe-of-four", TINY_FAMILIES["afmoe"], {"global_attn_every_n_layers": 4}),
        ("laguna-whole", TINY_FAMILIES["laguna-elements"], {"sliding_window": 0}),
        ("solar-whole", TINY_FAMILIES["solar"], {"rope_theta": None, "rope_parameters": WHOLE}),
    )
}
PLAIN = {
    "deepseek": partial(save_own_family, own=OWN_FAMILIES["deepseek"]),
    "llama": save_tiny_mixtral,
    "olmoe": save_tiny_olmoe,
    "qwen3moe": partial(save_tiny_qwen3_moe, norm_topk_prob=True),
}
CONFIGURATIONS = [(kind, name) for kind, names in FAMILIES.items() for name in names] + [(kind, kind) for kind in PLAIN]
PACKED = "gpt-oss-mxfp4"
CONVERTER = Path(__file__).with_name("convert_gguf.py")


@pytest.fixture(scope="module")
def converted(converter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint NAME and a file NAME.gguf of each configuration."""
    place = tmp_path_factory.mktemp("gguf")
    pack_experts(save_tiny_family(place / PACKED, TINY_FAMILIES["gpt-oss"]))
    for _, name in CONFIGURATIONS:
        if name in PLAIN:
            PLAIN[name](place / name)
        else:
            family = OWN[name] if name in OWN else TINY_FAMILIES[name]
            save_tiny_family(place / name, replace(family, shard_size="50GB"))
    names = [str(place / name) for name in (PACKED, *(name for _, name in CONFIGURATIONS))]
    command = [sys.executable, str(CONVERTER), str(converter), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return place


def test_every_architecture_is_converted() -> None:
    assert {architecture for architecture, _ in CONFIGURATIONS} == set(NAMES)


def with_given_rates(layer: LayerSpec, given: LayerSpec) -> LayerSpec:
    """Return a layer with the rates of another that are equal up to the rounding of a file: it has -exp(x) for x."""
    if layer.delta is None or given.delta is None:
        return layer
    assert layer.delta.log_rates == pytest.approx(given.delta.log_rates, rel=1e-5)
    return replace(layer, delta=replace(layer.delta, log_rates=given.delta.log_rates))


@pytest.mark.slow
@pytest.mark.in_ci
@pytest.mark.parametrize("name", [name for _, name in CONFIGURATIONS])
def test_a_converted_file_is_its_folder(converted: Path, name: str) -> None:
    expected = lower(open_checkpoint(str(converted / name)))
    found = lower(open_gguf(converted / f"{name}.gguf", cache=converted / "cache"))
    rows = found.model.vocab_size  # Gemma's are cut to the tokenizer's
    layers = tuple(map(with_given_rates, found.model.layers, expected.model.layers))
    outer = {"family": expected.model.family, "vocab_size": expected.model.vocab_size}
    assert replace(found.model, layers=layers, **outer) == expected.model
    for weight in expected.dense:
        of_folder, of_file = expected.dense_weight(weight).float(), found.dense_weight(weight).float()
        of_folder = of_folder[:rows] if weight in ("embedding", "lm_head") else of_folder
        assert torch.equal(of_file, of_folder), weight
    for unit in expected.units:
        assert torch.equal(found.unit(unit).float(), expected.unit(unit).float()), unit


@pytest.mark.slow
@pytest.mark.in_ci
def test_experts_in_mxfp4_stay_so(converted: Path) -> None:
    expected = lower(open_checkpoint(str(converted / PACKED)))
    found = lower(open_gguf(converted / f"{PACKED}.gguf", cache=converted / "cache"))
    assert found.own_unit_spec.is_mxfp4 and found.checkpoint.precision == "GGUF MXFP4"
    for unit in expected.units:
        assert torch.equal(found.unit(unit), expected.unit(unit)), unit


@pytest.mark.slow
@pytest.mark.in_ci
def test_a_published_file_of_qwen3_5_has_no_width_of_plain_layers(converted: Path, tmp_path: Path) -> None:
    """The configuration of the tests has one, that of the hub has none."""
    data = (
        (converted / "qwen3.5.gguf")
        .read_bytes()
        .replace(b"qwen35moe.feed_forward_length", b"qwen35moe.feed_forw4rd_length")
    )
    (tmp_path / "model.gguf").write_bytes(data)
    found = lower(open_gguf(tmp_path / "model.gguf", cache=tmp_path / "cache"))
    assert found.model.layers[0].experts.width == 64
