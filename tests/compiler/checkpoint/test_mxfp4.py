"""MXFP4 checkpoints: values from the table of the format, and whole models as transformers decodes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from moec.compiler.checkpoint.checkpoint import WEIGHTS_NAME
from moec.compiler.checkpoint.mxfp4 import decode, encode
from moec.compiler.quantization.packing import pack, unpack
from moec.compiler.quantization.quantizers import quantizer
from moec.compiler.quantization.unit_store import UnitStore
from moec.manifests.errors import CheckpointError
from moec.manifests.quant import QuantSpec
from moec.runtime import load
from moec.runtime.kernels import packed_matrix
from tests.compiler.lowered import lowered
from tests.gates.bundles import emit_bundle
from tests.tiny_compile import compile_tiny, save_texts
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.transformers_oracle import TransformersOracle

pytestmark = pytest.mark.oracle

MXFP4 = QuantSpec.parse("mxfp4")
TOKENS = np.random.default_rng(5).integers(4, 260, 30).tolist()
VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def pack_experts(folder: Path) -> Path:
    """Replace the experts of a gpt-oss checkpoint by random blocks and scales."""
    tensors, draw = load_file(folder / WEIGHTS_NAME), torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(121, 126, (experts, outputs, inputs // 32), generator=draw, dtype=torch.uint8)
        tensors.update({f"{name}_blocks": blocks, f"{name}_scales": scales})
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_experts(save_tiny_family(tmp_path_factory.mktemp("mxfp4") / "model", TINY_FAMILIES["gpt-oss"]))


def test_values_are_those_of_the_format() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    scales = torch.tensor([[127, 128, 120, 0, 254, 100, 1, 126, 127, 127, 127, 127, 127, 127, 127, 255]]).byte()
    found = decode(blocks, scales)
    assert found.shape == (1, 512) and found.dtype == torch.bfloat16
    for byte in range(240):
        power = 2.0 ** (int(scales[0, byte // 16]) - 127)
        for half, code in enumerate((byte & 15, byte >> 4)):
            expected = torch.tensor(VALUES[code] * power, dtype=torch.float64)
            assert found[0, 2 * byte + half].double() == expected or power in (2.0**-127, 2.0**127)
    assert found[0, -32:].isnan().all()


@pytest.mark.gate("G9")
def test_a_bundle_computes_what_transformers_unpacks(folder: Path, tmp_path: Path) -> None:
    loader = AutoModelForCausalLM
    model = loader.from_pretrained(folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True))
    model.eval().float()  # releases of transformers before 5.23 unpack to bfloat16, whatever `dtype` says
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].float().numpy()
    with load(emit_bundle(folder, tmp_path / "bundle"), expert_cache="100%", context=64) as engine:
        found = engine.logits(TOKENS)
    assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()


def test_units_are_what_transformers_unpacks_and_a_search_runs(folder: Path, tmp_path: Path) -> None:
    reference = TransformersOracle(folder)
    for key in reference.lowering.units:
        assert torch.equal(reference.weight(key), reference.lowering.unit(key).float()), key
    data = save_texts(tmp_path / "texts")
    result = compile_tiny(folder, tmp_path / "out", "bits_per_weight", 4.5, data=str(data), tasks=("perplexity",))
    assert result.path is not None


@given(rows=st.integers(1, 20), blocks=st.integers(1, 4), low=st.integers(5, 240), seed=st.integers(0, 999))
def test_what_was_decoded_is_packed_as_it_was(rows: int, blocks: int, low: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, blocks, 16), generator=draw, dtype=torch.uint8)
    packed[0, 0] = 0x80  # a block of zeros with both signs
    scales = torch.randint(low, low + 9, (rows, blocks), generator=draw, dtype=torch.uint8)
    weight = decode(packed, scales)
    matrix = quantizer("gptq")(weight, MXFP4, None, 0)
    assert torch.equal(matrix.dequantize(), weight.float())
    data = pack(matrix)
    assert len(data) == MXFP4.packed_bytes(rows, 32 * blocks)
    np.testing.assert_array_equal(packed_matrix.unpack(data, rows, 32 * blocks, MXFP4), weight.float().numpy() + 0.0)
    back = unpack(data, rows, 32 * blocks, MXFP4)
    assert torch.equal(back.codes, matrix.codes) and torch.equal(back.scales, matrix.scales)


@pytest.mark.parametrize(
    "weight",
    [torch.tensor([[1.25, *[0.0] * 31]]), torch.tensor([[6.0, 0.25, *[0.0] * 30]]), torch.full((1, 32), 2.0**-127)],
    ids=["no such float", "too wide a range", "too small"],
)
def test_what_has_no_exact_form_is_refused(weight: torch.Tensor) -> None:
    assert encode(weight) is None
    with pytest.raises(CheckpointError, match="is not made of 4-bit floats"):
        quantizer("rtn")(weight, MXFP4, None, 0)


def test_four_bits_are_the_checkpoint_s_own_and_lose_nothing(folder: Path, tmp_path: Path) -> None:
    """4.25 bits per weight give the logits of 16 bits, except for the rounding of activations."""
    result = compile_tiny(folder, tmp_path / "own", "uniform", 4, dense_bits=16)
    assert result.path is not None and {str(spec) for spec in result.plan.units.values()} == {"mxfp4"}
    assert result.plan.bits_per_weight == 4.25
    lowering = lowered(folder)
    store = UnitStore(lowering, "gptq")
    for key in lowering.units:
        assert torch.equal(store.weight(key, MXFP4), lowering.unit(key).float())
        assert store.error(key, MXFP4) == 0.0
    grouped = compile_tiny(folder, tmp_path / "grouped", "uniform", 4, group_sizes=(32,))
    assert {str(spec) for spec in grouped.plan.units.values()} == {"q4g32s"}
    with load(emit_bundle(folder, tmp_path / "sixteen"), expert_cache="100%", context=64) as engine:
        expected = engine.logits(TOKENS)
    with load(result.path, expert_cache="50%", context=64) as engine:
        found = engine.logits(TOKENS)
    # Nearly all tokens: in a random model, rounded activations sometimes change the experts of a token.
    assert np.median(np.abs(found - expected).max(1)) <= 0.02 * np.abs(expected).max()


def test_a_search_offers_them_in_the_place_of_16_bits(folder: Path, tmp_path: Path) -> None:
    data = save_texts(tmp_path / "texts")
    result = compile_tiny(folder, tmp_path / "out", "kl", 1e-6, data=str(data), tasks=("perplexity",), dense_bits=16)
    assert {str(spec) for spec in result.plan.units.values()} == {"mxfp4"}


def test_what_is_packed_wrongly_is_named(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    tensors = load_file(folder / WEIGHTS_NAME)
    (copy / "config.json").write_text((folder / "config.json").read_text())
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file(tensors | {name: tensors[name][:, :, :1].contiguous()}, copy / WEIGHTS_NAME)
    with pytest.raises(CheckpointError, match=f"expected a tensor `{name}` of shape"):
        lowered(copy)
    scales = tensors[name].clone()
    scales[1, 2, 0] = 255
    save_file(tensors | {name: scales}, copy / WEIGHTS_NAME)
    lowering = lowered(copy)
    with pytest.raises(CheckpointError, match=r"down_proj_blocks` .*NaN or infinite"):
        [lowering.unit(key) for key in lowering.units if key.layer == 1]
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    assert lowered(copy).own_unit_spec.is_mxfp4, "tensors decide, not labels"
