"""Packing: exact bytes of tiles made by hand, scales in bytes, and the runtime's reader as the inverse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.quantization.packing import pack, pack_16bit, unpack
from moec.compiler.quantization.quantized import LARGEST_BYTE, QuantizedMatrix, bytes_of, exponents, on_bytes
from moec.compiler.quantization.quantizers.gptq import quantize_gptq
from moec.compiler.quantization.quantizers.rtn import quantize_rtn
from moec.manifests.quant import QuantSpec
from moec.runtime.kernels import packed_matrix

pytestmark = pytest.mark.usefixtures("one_thread")


def _matrix(spec: QuantSpec, codes: torch.Tensor, seed: int = 0) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(seed)
    shape = (codes.shape[0], spec.groups(codes.shape[1]))
    minima = None if spec.symmetric else torch.randn(shape, generator=generator).half()
    scales = torch.rand(shape, generator=generator).half()
    if spec.byte_scales and minima is not None:
        scales, minima = on_bytes(scales, minima, spec.largest_code)
    return QuantizedMatrix(spec, codes, scales, minima)


def _random(spec: QuantSpec, rows: int, columns: int, seed: int = 0) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, spec.largest_code + 1, (rows, columns), dtype=torch.uint8, generator=generator)
    return _matrix(spec, codes, seed)


def _code_position(bitwidth: int, row: int, column: int) -> list[tuple[int, int, int, int]]:
    """Return the position of a code by the table of docs/format.md: byte in the tile, shift, bits, bits below."""
    q, c = divmod(column, 4)
    if bitwidth == 8:
        return [(64 * q + 4 * row + c, 0, 8, 0)]
    if bitwidth in (4, 5, 6):
        low = (64 * (q // 2) + 4 * row + c, 4 * (q % 2), 4, 0)
        high = {5: [(256 + 4 * row + c, q, 1, 4)], 6: [(256 + 64 * (q // 4) + 4 * row + c, 2 * (q % 4), 2, 4)]}
        return [low, *high.get(bitwidth, [])]
    if bitwidth == 1:
        return [(4 * row + c, q, 1, 0)]
    low = (64 * (q // 4) + 4 * row + c, 2 * (q % 4), 2, 0)
    return [low] if bitwidth == 2 else [low, (128 + 4 * row + c, q, 1, 2)]


@pytest.mark.parametrize("bitwidth", [1, 2, 3, 4, 5, 6, 8])
def test_every_code_of_a_tile_lies_where_the_format_says(bitwidth: int) -> None:
    spec = QuantSpec(bitwidth, 32, symmetric=bitwidth > 1)
    matrix = _random(spec, 16, 32, seed=bitwidth)
    packed = pack(matrix)
    header = 32 if spec.symmetric else 64
    assert len(packed) == header + 64 * bitwidth
    assert packed[:32].tobytes() == matrix.scales[:, 0].numpy().tobytes()
    tile, expected = packed[header:], np.zeros(64 * bitwidth, np.uint8)
    for row in range(16):
        for column in range(32):
            for byte, shift, bits, below in _code_position(bitwidth, row, column):
                expected[byte] |= ((int(matrix.codes[row, column]) >> below) & ((1 << bits) - 1)) << shift
    assert tile.tobytes() == expected.tobytes()


def test_bytes_of_a_hand_made_tile_of_three_values() -> None:
    codes = torch.ones(1, 64, dtype=torch.uint8)
    codes[0, 0], codes[0, 4], codes[0, 21], codes[0, 62] = 2, 0, 0, 2
    packed = pack(QuantizedMatrix(QuantSpec.parse("q1.6s"), codes, torch.ones(1, 1).half(), None))
    assert len(packed) == 32 + 208
    ones = 81 + 27 + 9 + 3 + 1  # five times code 1
    expected = bytearray(32 + 208)
    expected[0:2] = b"\x00\x3c"
    for column in range(4):
        numbers = [ones, ones, ones]
        numbers[0] += 81 - 27 if column == 0 else 0  # columns 0 and 4: q = 0 and 1
        numbers[1] -= 81 if column == 1 else 0  # column 21: q = 5, the first code of plane 1
        for plane, number in enumerate(numbers):
            expected[32 + 64 * plane + column] = -(-number * 256 // 243)
    expected[32 + 192] = 1 | 1 << 2 | 2 << 4 | 1 << 6  # columns 60 to 63
    assert packed.tobytes() == bytes(expected)


def test_bytes_of_a_hand_made_block_with_byte_scales() -> None:
    codes = torch.zeros(2, 64, dtype=torch.uint8)
    codes[1, 32] = 1
    scales = torch.tensor([[0.5, 0.25], [3.0, 200.0]], dtype=torch.float16)
    minima = torch.tensor([[-1.0, 0.0], [-1.0, -255.0]], dtype=torch.float16)
    packed = pack(QuantizedMatrix(QuantSpec.parse("q1g32b"), codes, scales, minima))
    expected = bytearray(32 + 2 * (32 + 64))
    expected[0:16] = bytes([127 - 8, 127] + [0] * 14)  # 0.5 = 128 x 2^-8, 200 = 200 x 2^0
    expected[16:32] = bytes([127 - 7, 127] + [0] * 14)
    expected[32:34], expected[48:50] = bytes([128, 3]), bytes([128, 1])
    expected[128:130], expected[144:146] = bytes([64, 200]), bytes([0, 255])
    expected[160 + 4] = 1  # row 1, column 32: byte 4 r + c of the second group's tile
    assert packed.tobytes() == bytes(expected)


@given(
    bitwidth=st.sampled_from([1, 1.6, 2, 3, 4, 5, 6, 8]),
    group=st.sampled_from([0, 32, 64, 128]),
    symmetric=st.booleans(),
    in_bytes=st.booleans(),
    rows=st.integers(1, 50),
    tiles=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_the_runtime_reads_back_what_was_packed(
    bitwidth: float, group: int, symmetric: bool, in_bytes: bool, rows: int, tiles: int, seed: int
) -> None:
    tile = 64 if bitwidth == 1.6 else 32
    group, symmetric = group // tile * tile, bitwidth == 1.6 or (symmetric and bitwidth > 1)
    in_bytes = in_bytes and group > 0 and bitwidth in (1, 2, 3, 4, 5) and not symmetric
    spec, columns = QuantSpec(bitwidth, group, symmetric, byte_scales=in_bytes), tiles * max(group, tile)
    matrix = _random(spec, rows, columns, seed)
    packed = pack(matrix)
    assert packed.dtype == np.uint8 and len(packed) == spec.packed_bytes(rows, columns)
    np.testing.assert_array_equal(packed_matrix.unpack_codes(packed, rows, columns, spec)[:rows], matrix.codes.numpy())
    np.testing.assert_array_equal(packed_matrix.unpack(packed, rows, columns, spec)[:rows], matrix.dequantize().numpy())
    back = unpack(packed, rows, columns, spec)
    assert back.spec == spec and torch.equal(back.codes, matrix.codes) and torch.equal(back.scales, matrix.scales)
    assert (back.minima is None) == spec.symmetric
    assert back.minima is None or matrix.minima is None or torch.equal(back.minima, matrix.minima)


@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    rows=st.integers(1, 40),
    columns=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_sixteen_bits_are_unchanged(dtype: torch.dtype, rows: int, columns: int, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    spec = QuantSpec(16, float_type="bfloat16" if dtype == torch.bfloat16 else "float16")
    packed = pack_16bit(weight, spec)
    assert len(packed) == spec.packed_bytes(rows, columns)
    np.testing.assert_array_equal(packed_matrix.unpack(packed, rows, columns, spec)[:rows], weight.float().numpy())


@pytest.mark.parametrize("spec", [QuantSpec(3, 32), QuantSpec.parse("q1.6g64s")], ids=str)
def test_padding_rows_weigh_nothing(spec: QuantSpec) -> None:
    packed = pack(_random(spec, 3, 64))
    full = packed_matrix.unpack(packed, 16, 64, spec)
    assert not full[3:].any()


def test_a_transposed_view_packs_like_its_copy() -> None:
    spec = QuantSpec(4)
    codes = torch.randint(0, 16, (64, 32), dtype=torch.uint8).T
    matrix = _matrix(spec, codes)
    copy = QuantizedMatrix(spec, codes.contiguous(), matrix.scales, matrix.minima)
    assert pack(matrix).tobytes() == pack(copy).tobytes()


def _broken(**changes: object) -> QuantizedMatrix:
    good = _random(QuantSpec(4, 32), 16, 64)
    fields = {"spec": good.spec, "codes": good.codes, "scales": good.scales, "minima": good.minima, **changes}
    return QuantizedMatrix(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": torch.full((16, 64), 16, dtype=torch.uint8)}, "expected values below 16, found 16"),
        (
            {"codes": torch.full((16, 64), 3, dtype=torch.uint8), "spec": QuantSpec.parse("q1.6g64s"), "minima": None},
            "expected values below 3, found 3",
        ),
        ({"codes": torch.zeros(16, 64)}, "expected a uint8 matrix"),
        ({"codes": torch.zeros(16, 63, dtype=torch.uint8)}, "cannot hold rows of 63"),
        ({"scales": torch.zeros(16, 1, dtype=torch.float16)}, "scales: expected float16"),
        ({"scales": torch.zeros(16, 2)}, "scales: expected float16"),
        ({"minima": torch.full((16, 2), float("inf"), dtype=torch.float16)}, "minima: found a value that is not"),
        ({"minima": None}, "minima belong to asymmetric"),
        ({"spec": QuantSpec(16, float_type="float16")}, "a 16-bit matrix has no codes"),
    ],
)
def test_matrices_that_break_the_format_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(_broken(**changes))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(2, 2), "cannot store torch.float32 unchanged"),
        (torch.zeros(2, 2, dtype=torch.float16), "cannot store torch.float16"),
        (torch.zeros(2, dtype=torch.bfloat16), "expected a matrix"),
    ],
)
def test_other_floats_are_refused(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_16bit(weight, QuantSpec(16, float_type="bfloat16"))


@given(rows=st.integers(1, 6), groups=st.integers(1, 8), power=st.integers(-40, 15), seed=st.integers(0, 999))
def test_values_are_near_and_found_again(rows: int, groups: int, power: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = (torch.rand(rows, groups, generator=generator) * 2.0**power).clamp_max(65280)
    minima = -(torch.rand(rows, groups, generator=generator) * 2.0**power).clamp_max(65280)
    minima[0, 0] = 0
    near, low = on_bytes(scales, minima, 3)
    assert near.dtype == low.dtype == torch.float16 and bool((low <= 0).all())
    for values, found in ((scales, near.float()), (-minima, -low.float())):
        step = torch.ldexp(torch.ones(rows), exponents(values)).unsqueeze(1)
        assert bool(((values - found).abs() <= step / 2).all())
        assert bool((step <= (values.amax(1, keepdim=True) / 127.5).clamp_min(2.0**-24)).all()), "seven bits at least"
        stored, ends = bytes_of(found)
        assert stored.dtype == ends.dtype == torch.uint8 and bool(((ends >= 103) & (ends <= 135)).all())
        assert torch.equal(torch.ldexp(stored.float(), ends.int().unsqueeze(1) - 127), found)
    again = on_bytes(near, low, 3)
    assert torch.equal(again[0], near) and torch.equal(again[1], low)
    for row in range(rows):
        alone = on_bytes(scales[row : row + 1], minima[row : row + 1], 3)
        assert torch.equal(alone[0], near[row : row + 1]) and torch.equal(alone[1], low[row : row + 1])


def test_minima_above_zero_give_way_to_wider_scales() -> None:
    scales, minima = on_bytes(torch.tensor([[1.0]]), torch.tensor([[6.0]]), 3)
    assert float(minima) == 0 and float(scales) == 3.0, "0 to 9 in three steps, where 6 to 9 were asked for"


@pytest.mark.parametrize("values", [[[1.0, 1.0 / 3]], [[-1.0, 0.5]], [[1.0, 2.0**-9]]])
def test_other_values_are_refused(values: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="multiples of one power of two"):
        bytes_of(torch.tensor(values))
    assert LARGEST_BYTE == 255


@pytest.mark.parametrize("text", ["q1g32b", "q2g32b", "q3g64b", "q4g32b", "q5g32b"])
def test_quantizers_lose_little_by_bytes(text: str) -> None:
    """Output errors are within 2 % of those with scales of 16 bits, with less than 95 % of the bytes."""
    spec, plain = QuantSpec.parse(text), QuantSpec.parse(text[:-1])
    generator = torch.Generator().manual_seed(3)
    weight, inputs = torch.randn(64, 512, generator=generator), torch.randn(2048, 512, generator=generator)
    moment = inputs.T @ inputs
    for rounded in (lambda s: quantize_rtn(weight, s, True), lambda s: quantize_gptq(weight, s, moment, 2048)):
        small, large = (((rounded(s).dequantize() - weight) @ inputs.T).norm() for s in (spec, plain))
        assert float(small) < 1.02 * float(large)
    assert spec.row_bytes(512) < 0.95 * plain.row_bytes(512)
