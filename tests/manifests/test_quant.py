"""Packed sizes against the layout as docs/format.md draws it, and the short names of formats."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.quant import MAX_DIMENSION, PRUNED, TERNARY, QuantSpec, round_up

GROUPS = st.sampled_from((0, 32, 64, 96, 128, 256))
SPECS = st.one_of(
    st.builds(QuantSpec, st.sampled_from((2, 3, 4, 5, 6, 8)), GROUPS, st.booleans()),
    st.builds(QuantSpec, st.just(1), GROUPS),
    st.builds(QuantSpec, st.just(TERNARY), st.sampled_from((0, 64, 128, 192, 256)), st.just(True)),
    st.builds(
        QuantSpec, st.sampled_from((1, 2, 3, 4, 5)), st.sampled_from((32, 64, 96, 128)), byte_scales=st.just(True)
    ),
    st.sampled_from(("bfloat16", "float16")).map(lambda kind: QuantSpec(16, float_type=kind)),
)


def rows16_bytes(spec: QuantSpec, rows: int, columns: int) -> int:
    """Counted piece by piece: row blocks, groups, scales, minima, tiles."""
    total = 0
    for _ in range(0, rows, 16):
        if spec.bitwidth == 16:
            total += 16 * columns * 2
            continue
        group, width = spec.group_size or columns, 1 if spec.byte_scales else 2
        total += 16 * 2 if spec.byte_scales else 0
        for _ in range(0, columns, group):
            total += 16 * width
            total += 0 if spec.symmetric else 16 * width
            if spec.bitwidth == TERNARY:
                total += group // 64 * (3 * 64 + 16)
                continue
            for _ in range(0, group, 32):
                total += 64 * int(spec.bitwidth)
    return total


@given(spec=SPECS, rows=st.integers(1, 70), tiles=st.integers(1, 24))
def test_packed_bytes_are_those_of_the_layout(spec: QuantSpec, rows: int, tiles: int) -> None:
    columns = 32 * tiles
    if columns % (spec.group_size or (64 if spec.bitwidth == TERNARY else 1)):
        assert not spec.fits(columns)
        with pytest.raises(ValueError, match=f"format {spec} cannot hold rows of {columns} weights"):
            spec.packed_bytes(rows, columns)
        return
    assert spec.packed_bytes(rows, columns) == rows16_bytes(spec, rows, columns)
    assert spec.packed_bytes(16, columns) == 16 * spec.row_bytes(columns)
    assert spec.bits_per_weight(columns) == 8 * rows16_bytes(spec, 16, columns) / (16 * columns)


@given(SPECS)
def test_short_form_round_trip(spec: QuantSpec) -> None:
    assert QuantSpec.parse(str(spec)) == spec


def test_short_forms() -> None:
    names = ("q4g64", "q8", "q5g64b", "q6s", "q2s", "q3g32s", "q1.6g128s", "q1.6s", "q2g32b", "q0", "bf16", "fp16")
    assert [str(QuantSpec.parse(name)) for name in names] == list(names)
    assert QuantSpec.parse("q4g64") == QuantSpec(4, 64) and QuantSpec.parse("q2s") == QuantSpec(2, 0, True)


@pytest.mark.parametrize(
    "text",
    ["", "q", "q7", "q9", "q16", "q1s", "q1.6", "q1.6g128", "q1.6g32s", "q1.60s", "q1.s", "q2.0", "q0s", "q0g64", "q00",
     "q4g", "q4g31", "q4g16", "q4g-32", "Q4", "q4g64 ", " q4", "q4sg64", "q4g64ss",
     "q2b", "q6g32b", "q8g32b", "q1.6g64b", "q2g32sb", "q2g32bs", "q0b",
     "bf16s", "float16", "q4g\uff16\uff14", "q4g" + "9" * 5000, "q4g16777248", "x" * 5000],
)  # fmt: skip
def test_not_a_format(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        QuantSpec.parse(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bitwidth": 7}, "bitwidth must be one of"),
        ({"bitwidth": -1}, "bitwidth must be one of"),
        ({"bitwidth": 0, "group_size": 32}, "has no groups"),
        ({"bitwidth": 0, "symmetric": True}, "has no groups"),
        ({"bitwidth": 16}, "float_type belongs to bitwidth 16"),
        ({"bitwidth": 4, "float_type": "bfloat16"}, "float_type belongs to bitwidth 16"),
        ({"bitwidth": 16, "float_type": "float16", "group_size": 32}, "no groups"),
        ({"bitwidth": 16, "float_type": "float16", "symmetric": True}, "no groups"),
        ({"bitwidth": TERNARY}, "1.6 bits is symmetric"),
        ({"bitwidth": TERNARY, "symmetric": True, "group_size": 96}, "multiple of 64, found 96"),
        ({"bitwidth": 2, "byte_scales": True}, "scales in bytes belong to groups of 1 to 5 bits"),
        ({"bitwidth": 8, "group_size": 32, "byte_scales": True}, "scales in bytes"),
        ({"bitwidth": 4, "group_size": 32, "symmetric": True, "byte_scales": True}, "scales in bytes"),
        ({"bitwidth": 4, "group_size": 32, "float_type": "mxfp4", "byte_scales": True}, "scales in bytes"),
        ({"bitwidth": 4, "group_size": -32}, "group_size"),
        ({"bitwidth": 4, "group_size": 33}, "multiple of 32"),
        ({"bitwidth": 4, "group_size": MAX_DIMENSION + 32}, "group_size"),
    ],
)
def test_out_of_range(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantSpec(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [0, -1, MAX_DIMENSION + 1])
def test_rows_out_of_range(rows: int) -> None:
    with pytest.raises(ValueError, match=f"rows out of range: {rows}"):
        QuantSpec(8).packed_bytes(rows, 32)


def test_columns_that_no_format_holds() -> None:
    assert not any(QuantSpec.parse(text).fits(0) for text in ("q4", "bf16"))
    assert not QuantSpec(4).fits(48) and QuantSpec.parse("bf16").fits(1)


@pytest.mark.parametrize(("text", "bits"), [("q1.6g64s", 1.875), ("q1.6g128s", 1.75), ("q1.6s", 1.625 + 16 / 2048)])
def test_bits_of_three_values(text: str, bits: float) -> None:
    assert QuantSpec.parse(text).bits_per_weight(2048) == bits


@given(value=st.integers(0, 10**6), multiple=st.integers(1, 5000))
def test_round_up(value: int, multiple: int) -> None:
    found = round_up(value, multiple)
    assert found % multiple == 0 and value <= found < value + multiple


def test_what_is_left_out_takes_no_bytes_and_fits_everywhere() -> None:
    spec = QuantSpec(PRUNED)
    assert spec.is_pruned and spec.fits(7) and not spec.fits(0)
    assert spec.packed_bytes(16, 7) == spec.row_bytes(7) == spec.bits_per_weight(7) == spec.groups(7) == 0
