"""Quantized checkpoints decode as the original tools do, to the last bit; other parts are refused as a layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.checkpoint.packed_tensors import find_packed
from moec.compiler.checkpoint.packed_weights import LayoutError
from moec.compiler.families import lower
from moec.compiler.preflight.preflight import preflight
from moec.compiler.request.options import Talk
from moec.manifests.errors import CheckpointError
from moec.runtime import load
from tests.compiler.checkpoint import write_packed
from tests.compiler.conftest import TINY_PLAIN
from tests.compiler.lowered import lowered
from tests.gates.bundles import emit_bundle
from tests.tiny_compile import compile_tiny, save_texts
from tests.tiny_models import save_tiny_qwen3_moe

LAYOUTS = list(write_packed.LAYOUTS)
WEIGHT = "model.layers.1.mlp.experts.2.up_proj"


@pytest.fixture
def copied(quantized: Callable[[str], Path], tmp_path: Path) -> Callable[[str], tuple[Path, dict[str, torch.Tensor]]]:
    """Return a function that copies a quantized checkpoint, which a test may damage, and reads its tensors."""

    def copy(layout: str) -> tuple[Path, dict[str, torch.Tensor]]:
        folder = Path(shutil.copytree(quantized(layout), tmp_path / layout))
        return folder, load_file(folder / "model.safetensors")

    return copy


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_that_the_tool_decodes(layout: str, quantized: Callable[[str], Path]) -> None:
    folder = quantized(layout)
    checkpoint, expected = open_checkpoint(str(folder)), load_file(folder / "expected.st")
    assert set(checkpoint.packed) == set(expected) and len(expected) == 2 * (4 * 3 + 4)
    for name, weight in expected.items():
        packed = checkpoint.packed[name]
        assert torch.equal(packed.decode(checkpoint.stored_parts(name)).to(weight.dtype), weight), name
        assert checkpoint.tensor(name, rows=(3, 9)).shape == (6, weight.shape[1])
    assert checkpoint.precision and "quantization_config" not in checkpoint.config
    report = preflight(lower(checkpoint), required=(), offered=())
    assert report is not None


@pytest.mark.parametrize("layout", ["gptq-act-order", "awq", "ct-int4", "ct-mxfp4", "fp8-blocks"])
def test_a_16_bit_bundle_computes_with_the_decoded_weights(
    layout: str, quantized: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = quantized(layout)
    decoded, checkpoint = tmp_path / "decoded", open_checkpoint(str(folder))
    shutil.copytree(folder.parent / "plain", decoded)
    save_file(
        {name: checkpoint.tensor(name) for name in checkpoint.tensors}, decoded / "model.safetensors", {"format": "pt"}
    )
    found = []
    for name, source in (("one", folder), ("other", decoded)):
        with load(emit_bundle(source, tmp_path / name), expert_cache="100%", context=64) as engine:
            found.append(engine.logits([1, 5, 9, 2, 7]))
    assert np.array_equal(*found)


def test_a_certificate_names_the_precision_of_its_baseline(
    quantized: Callable[[str], Path], tmp_path: Path, one_thread: None
) -> None:
    notes: list[str] = []
    data, talk = str(save_texts(tmp_path / "data")), Talk(notes.append)
    result = compile_tiny(quantized("gptq-4"), tmp_path / "out", "kl", 0.5, data=data, talk=talk)
    assert result.quality["baseline_precision"] == "GPTQ, 4 bits"
    assert "the weights are stored as GPTQ, 4 bits: what they decode to is the baseline" in notes


def test_the_version_of_gptq_follows_from_the_zeros(
    quantized: Callable[[str], Path], copied: Callable[[str], tuple[Path, dict[str, torch.Tensor]]]
) -> None:
    """A wrong label changes nothing. The layout `gptq-v2` has the label of the first version."""
    folder, _ = copied("gptq-4")
    right = {name: open_checkpoint(str(folder)).tensor(name) for name in open_checkpoint(str(folder)).packed}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (folder / "config.json").write_text(json.dumps(config))
    labelled = open_checkpoint(str(folder))
    assert all(torch.equal(labelled.tensor(name), weight) for name, weight in right.items())


Damage = Callable[[dict[str, torch.Tensor], dict[str, Any]], None]


def _set(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    def damage(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
        tensors[f"{WEIGHT}.{part}"] = change(tensors[f"{WEIGHT}.{part}"]).contiguous()

    return damage


def _drop(part: str) -> Damage:
    def damage(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
        del tensors[f"{WEIGHT}.{part}"]

    return damage


def _setting(name: str, value: object) -> Damage:
    return lambda tensors, settings: settings.update({name: value})


@pytest.mark.parametrize(
    ("layout", "damage", "message"),
    [
        ("gptq-4", _set("qzeros", lambda t: t[:, :5]), "expected `qzeros` .* 2, 3, 4 or 8 bits"),
        ("gptq-4", _set("qweight", lambda t: t[:, :-8]), "expected `qweight`|expected `qzeros`"),
        ("gptq-4", _set("g_idx", lambda t: t[:-1]), r"expected `g_idx` \[64\] for 4 bits"),
        ("gptq-4", _set("g_idx", lambda t: t + 7), "`g_idx` names a group beyond 2"),
        ("awq", _set("qzeros", lambda t: t[:1]), "expected `qweight` .* of 4 bits"),
        ("ct-int4", _set("weight_packed", lambda t: t[:, :3]), r"expected `weight_packed` \[64, 64 x 4 or 8 bits\]"),
        ("ct-int4", _set("weight_shape", lambda t: t[:1]), "expected two numbers in `weight_shape`"),
        ("ct-int4", _set("weight_scale", lambda t: t[:5]), "`weight_scale` "),
        (
            "ct-mxfp4",
            _set("weight_packed", lambda t: t[:, :-1]),
            r"expected `weight_packed` \[rows, a multiple of 16\]",
        ),
        ("ct-mxfp4", _set("weight_scale", lambda t: t[:5]), r"`weight_scale` \[64, 2\], found .* \[5, 2\]"),
        ("ct-mxfp4", _set("weight_scale", lambda t: t.to(torch.float8_e4m3fn)), r"or .* \(NVFP4\); found F8_E4M3"),
        ("ct-mxfp4", _drop("weight_scale"), "exponents in bytes.* found none"),
        ("ct-nvfp4", _drop("weight_global_scale"), r"with `weight_global_scale` \(NVFP4\); found F8_E4M3"),
        ("ct-nvfp4", _set("weight_scale", lambda t: t[:, :1]), r"scales \[64, 4\] and one scale in all, found"),
        ("modelopt-nvfp4", _set("weight_scale_2", lambda t: t.repeat(2)), r"one scale in all, found .* and \[2\]"),
        ("modelopt-nvfp4", _drop("weight_scale_2"), "with `weight_scale_2`"),
        ("fp8-blocks", _set("weight_scale_inv", lambda t: t[:1]), r"scales of shape \[2, 2\] for blocks of \[32, 32\]"),
        ("fp8-blocks", _drop("weight_scale_inv"), "expected `weight_scale_inv` or `weight_scale` .* found neither"),
        ("fp8-blocks", _setting("weight_block_size", [0, 3]), "two positive numbers in `weight_block_size`"),
        ("ct-int4", _set("weight_shape", lambda t: t.to(torch.uint16)), "has the type U16, which no known layout uses"),
        ("ct-int4", _set("weight_scale", lambda t: t.to(torch.uint16)), "has the type U16, which no known layout uses"),
    ],
)
def test_layouts_that_no_reader_knows(
    layout: str,
    damage: Damage,
    message: str,
    copied: Callable[[str], tuple[Path, dict[str, torch.Tensor]]],
) -> None:
    folder, tensors = copied(layout)
    config = json.loads((folder / "config.json").read_text())
    damage(tensors, config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        lowering = lowered(folder)
        [lowering.unit(key) for key in lowering.units]


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes", "mxfp4", None])
def test_a_label_without_quantized_tensors_is_ignored_with_a_note(method: str | None, tmp_path: Path) -> None:
    folder = save_tiny_qwen3_moe(tmp_path / "plain", TINY_PLAIN)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    opened = open_checkpoint(str(folder))
    assert "no tensor is quantized" in opened.notes[0] and not opened.packed
    lower(opened)


@pytest.mark.parametrize("label", [{"quant_method": "auto-round"}, {"quant_method": "bitsandbytes"}, None])
@pytest.mark.parametrize("layout", ["gptq-4", "fp8-blocks"])
def test_tensors_decide_whatever_the_label_says(
    layout: str, label: dict[str, str] | None, copied: Callable[[str], tuple[Path, dict[str, torch.Tensor]]]
) -> None:
    folder, _ = copied(layout)
    config = json.loads((folder / "config.json").read_text())
    own = config.pop("quantization_config")
    (folder / "quantize_config.json").write_text(json.dumps({**own, "quant_method": "other"}))
    details = {key: value for key, value in own.items() if key != "quant_method"}
    changed = config if label is None else {**config, "quantization_config": {**details, **label}}
    (folder / "config.json").write_text(json.dumps(changed))
    opened = open_checkpoint(str(folder))
    assert opened.packed
    lowering = lower(opened)
    lowering.unit(next(iter(lowering.units)))


def test_a_layout_that_is_not_read_names_the_label(tmp_path: Path) -> None:
    folder = save_tiny_qwen3_moe(tmp_path / "plain", TINY_PLAIN)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "hqq"}}))
    save_file({"model.layers.0.W_q": torch.zeros(4, dtype=torch.uint8)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="the quantization method `hqq`, expected tensors in the layout of awq"):
        open_checkpoint(str(folder))


DTYPES = {
    "I32": torch.int32, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "U8": torch.uint8,
}  # fmt: skip
LIKELY = {
    "qweight": "I32", "qzeros": "I32", "scales": "F16", "g_idx": "I32", "weight": "F8_E4M3", "weight_scale": "F32",
    "weight_scale_inv": "BF16", "weight_packed": "I32", "weight_shape": "I64", "weight_zero_point": "I32",
    "weight_g_idx": "I32", "input_scale": "F32",
}  # fmt: skip
SIZES = st.sampled_from([0, 1, 2, 4, 8, 32])
FAMILIES = (
    ("weight_packed", "weight_scale"),
    ("qweight", "qzeros", "scales", "g_idx"),
    ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    ("weight", "weight_scale", "weight_scale_inv", "weight_zero_point", "input_scale"),
)


@dataclass(frozen=True)
class Ref:
    """A tensor on disk."""

    dtype: str
    shape: tuple[int, ...]


@st.composite
def parts(draw: st.DrawFn) -> dict[str, Ref]:
    """Draw the parts of one weight: names of one layout, shapes that fit now and then."""
    names = draw(st.sampled_from(FAMILIES))
    chosen = [name for name in names if draw(st.integers(0, 9)) > 1]
    shape = st.lists(SIZES, min_size=0, max_size=3) | st.tuples(SIZES, SIZES).map(list)
    dtype = st.sampled_from([*DTYPES])
    return {
        f"m.{name}": Ref(LIKELY[name] if draw(st.integers(0, 9)) else draw(dtype), tuple(draw(shape)))
        for name in chosen
    }


def filled(ref: Ref, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-40, 40, ref.shape, generator=generator)
    return values.to(torch.float32).to(DTYPES[ref.dtype]) if "F" in ref.dtype else values.to(DTYPES[ref.dtype])


@given(parts(), st.integers(0, 99), st.sampled_from([{}, {"weight_block_size": [2, 4]}, {"weight_block_size": [0, 1]}]))
def test_any_parts_are_decoded_or_refused(tensors: dict[str, Ref], seed: int, config: dict[str, Any]) -> None:
    try:
        found = find_packed(tensors, config, lambda name: filled(tensors[name], seed))
        for weight in found.weights.values():
            stored = {part: filled(tensors[name], seed) for part, name in weight.names.items()}
            decoded = weight.decode(stored)
            assert decoded.shape == weight.shape and decoded.dtype == torch.float32
    except LayoutError as error:
        assert "`m.weight`" in str(error) or "`" in str(error)


@st.composite
def fitting(draw: st.DrawFn) -> dict[str, Ref]:
    """Draw the parts of a weight of integers, [N, K] in groups, whose shapes fit."""
    rows, groups, size = 32 * draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([32, 64]))
    columns, bits = groups * size, draw(st.sampled_from([2, 3, 4, 8]))
    wide = draw(st.sampled_from([4, 8]))
    scale = draw(st.sampled_from([(rows, 1), (rows,), (1,), (), (-(-rows // 128), -(-columns // 128))]))
    layouts: list[dict[str, Ref]] = [
        {
            "qweight": Ref("I32", (columns * bits // 32, rows)),
            "qzeros": Ref("I32", (groups, rows * bits // 32)),
            "scales": Ref("F16", (groups, rows)),
        },
        {
            "qweight": Ref("I32", (columns, rows // 8)),
            "qzeros": Ref("I32", (groups, rows // 8)),
            "scales": Ref("F16", (groups, rows)),
        },
        {
            "weight_packed": Ref("I32", (rows, columns * wide // 32)),
            "weight_scale": Ref("BF16", (rows, groups)),
            "weight_zero_point": Ref("I32", (rows * wide // 32, groups)),
            "weight_shape": Ref("I64", (2,)),
        },
        {
            "weight": Ref("I8", (rows, columns)),
            "weight_scale": Ref("F32", scale),
            "weight_zero_point": Ref("I8", scale),
        },
    ]
    found = draw(st.sampled_from(layouts))
    if "weight_zero_point" in found and draw(st.booleans()):
        del found["weight_zero_point"]
    found["shape"] = Ref("", (rows, columns))
    return found


@given(fitting(), st.integers(0, 99))
def test_codes_and_their_grid_give_the_decoded_weight(drawn: dict[str, Ref], seed: int) -> None:
    shape = drawn.pop("shape").shape
    refs = {f"m.{part}": ref for part, ref in drawn.items()}
    generator = torch.Generator().manual_seed(seed)

    def read(name: str) -> torch.Tensor:
        ref = refs[name]
        if name == "m.weight_shape":
            return torch.tensor(shape)
        if "F" in ref.dtype:
            return torch.randn(ref.shape, generator=generator).to(DTYPES[ref.dtype])
        least, most = (-128, 128) if ref.dtype == "I8" else (-(1 << 31), 1 << 31)
        return torch.randint(least, most, ref.shape, generator=generator).to(DTYPES[ref.dtype])

    weight = find_packed(refs, {}, read).weights["m.weight"]
    stored = {part: read(name) for part, name in weight.names.items()}
    assert weight.shape == shape and weight.integers is not None
    decoded, codes, grid = weight.decode(stored), weight.integers.codes(stored), weight.integers.grid(stored)
    assert codes.dtype == torch.uint8 and codes.shape == shape and int(codes.max()) < 1 << grid.bits
    assert torch.equal(grid.values(codes), decoded) and grid.need().columns == shape[1]


@given(st.sampled_from([2, 3, 4, 8]), st.integers(1, 3), st.integers(1, 4), st.booleans(), st.integers(0, 99))
def test_codes_of_any_width_come_back(bits: int, rows: int, words: int, negative: bool, seed: int) -> None:
    """Codes that are written bit by bit are read again, across the borders of words."""
    from moec.compiler.checkpoint.packed_weights import unpack_codes

    count = 32 * words
    codes = torch.randint(0, 1 << bits, (rows, count), generator=torch.Generator().manual_seed(seed))
    stream = [[(int(code) >> at) & 1 for code in row for at in range(bits)] for row in codes]
    packed = torch.tensor(
        [[sum(bit << at for at, bit in enumerate(row[i : i + 32])) for i in range(0, len(row), 32)] for row in stream]
    )
    signed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed) if negative else packed
    assert torch.equal(unpack_codes(signed.to(torch.int64), bits, count).long(), codes)
