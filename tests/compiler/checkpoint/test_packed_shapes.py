"""Random parts of quantized weights: each is decoded to the shape that was told, or refused as a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.checkpoint.packed_tensors import find_packed
from moec.compiler.checkpoint.packed_weights import LayoutError

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
