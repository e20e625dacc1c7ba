"""Arguments that must be refused before a byte is read: wrong sizes, indices, dtypes, layouts, overlaps (G10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from tests.kernels.conftest import need
from tests.kernels.packer import FORMATS, random_matrix
from tests.kernels.products import matrix_of

pytestmark = pytest.mark.gate("G10")
SPEC = QuantSpec.parse("q4g64")
F32, I32, I64 = np.float32, np.int32, np.int64


def zeros(*shape: int, dtype: type = F32) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize("spec", FORMATS, ids=str)
def test_buffers_of_another_size_are_refused(spec: QuantSpec) -> None:
    size = spec.packed_bytes(33, 128)
    for wrong in (0, 1, size - 1, size + 1, 2 * size):
        with pytest.raises(ValueError, match="bytes"):
            kernels.PackedMatrix(np.zeros(wrong, np.uint8), 33, 128, spec)


FORMS = [
    (33, 128, 7, 0, False, 0), (33, 128, 9, 0, False, 0), (33, 128, 5, 48, False, 0), (33, 128, 4, 48, False, 0),
    (33, 128, 243, 64, False, 0), (33, 128, 243, 32, True, 0), (33, 160, 243, 0, True, 0),
    (33, 128, 243, 0, True, 3), (33, 128, 4, 96, False, 0), (33, 130, 4, 0, False, 0), (33, 128, 4, -32, False, 0),
    (33, 128, 4, 0, False, 1), (33, 128, 16, 0, False, 0), (33, 128, 16, 0, True, 1), (33, 128, 16, 32, False, 1),
    (33, 128, 16, 0, False, 7), (0, 128, 4, 0, False, 0), (-1, 128, 4, 0, False, 0), (1 << 40, 128, 4, 0, False, 0),
    (33, 1 << 40, 4, 0, False, 0), (1 << 24, 1 << 24, 8, 0, False, 0), ((1 << 63) - 1, 32, 4, 0, False, 0),
    (33, 128, 4, 0, False, 0, True), (33, 128, 4, 32, True, 0, True), (33, 128, 5, 32, True, 0, True),
    (33, 128, 5, 32, False, 3), (33, 128, 6, 32, False, 0, True), (33, 128, 8, 32, False, 0, True),
    (33, 128, 4, 32, False, 3, True), (33, 128, 243, 64, True, 0, True), (33, 128, 16, 0, False, 1, True),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_extension_refuses_forms_by_itself(form: tuple[int, ...]) -> None:
    """A form is rows, columns, bitwidth, group size, symmetric, float type and, by default False, byte scales."""
    need("scalar")
    extension = kernels.loaded()
    assert extension is not None
    with pytest.raises(ValueError, match=r"format|bytes"):
        extension.PackedMatrix(np.zeros(4096, np.uint8), *(*form, False)[:7])


@pytest.mark.parametrize(
    "data",
    [zeros(9216), np.zeros((2, 4608), np.uint8), np.zeros(18432, np.uint8)[::2]],
    ids=["dtype", "rank", "strides"],
)
def test_buffers_of_another_kind_are_refused(data: np.ndarray) -> None:
    with pytest.raises(ValueError, match="data"):
        kernels.PackedMatrix(data, 64, 256, SPEC)


MATRIX = random_matrix(33, 128, SPEC)
FFN = (random_matrix(64, 128, SPEC), random_matrix(64, 128, SPEC), random_matrix(128, 64, SPEC))


def linear(x: np.ndarray, out: np.ndarray) -> None:
    kernels.linear(matrix_of(MATRIX), x, out)


def rows(indices: np.ndarray, out: np.ndarray) -> None:
    kernels.dequantize_rows(matrix_of(MATRIX), indices, out)


def ffn(x: np.ndarray, tokens: list[int], ranks: list[int], out: np.ndarray) -> None:
    expert = kernels.Expert(*(matrix_of(part) for part in FFN))
    kernels.expert_ffn(expert, x, np.array(tokens, I32), np.array(ranks, I32), out)


def attend(
    heads: int = 4, size: int = 8, slot: int = 0, position: int = 0, kv_heads: int = 2, ends: Any = None, **rule: Any
) -> None:
    cache, q = zeros(2, kv_heads, 5, 8), zeros(1, heads, size)
    places = kernels.TokenPlaces(np.array([slot], I32), np.array([position], I32), ends)
    kernels.attention(q, cache, cache.copy(), places, kernels.AttentionRule(1.0, **rule), q.copy())


def store(slot: int, position: int, heads: int = 2, kind: Any = np.float32, other: Any = np.float32) -> None:
    k, cache = zeros(1, heads, 8), zeros(2, 2, 5, 8).astype(kind)
    kernels.store_kv(k, k.copy(), cache, cache.astype(other), np.array([slot], I32), np.array([position], I32))


def attend_mixed() -> None:
    q, cache, places = zeros(1, 4, 8), zeros(2, 2, 5, 8), kernels.TokenPlaces(np.zeros(1, I32), np.zeros(1, I32))
    kernels.attention(q, cache.astype(np.float16), cache, places, kernels.AttentionRule(1.0), q.copy())


def rope(position: int, half: int = 4) -> None:
    kernels.rope(zeros(1, 2, 8), zeros(5, half), zeros(5, half), np.array([position], I32))


CASES: dict[str, Callable[[], object]] = {
    "x: columns": lambda: linear(zeros(2, 127), zeros(2, 33)),
    "x: rank": lambda: linear(zeros(128), zeros(2, 33)),
    "x: dtype": lambda: linear(zeros(2, 128, dtype=np.float64), zeros(2, 33)),
    "x: order": lambda: linear(np.asfortranarray(zeros(2, 128)), zeros(2, 33)),
    "x: big endian": lambda: linear(zeros(2, 128).astype(">f4"), zeros(2, 33)),
    "out: rows": lambda: linear(zeros(2, 128), zeros(2, 48)),
    "out: tokens": lambda: linear(zeros(2, 128), zeros(3, 33)),
    "out: strides": lambda: linear(zeros(2, 128), zeros(2, 66)[:, ::2]),
    "rows: above": lambda: rows(np.array([33], I64), zeros(1, 128)),
    "rows: padding row": lambda: rows(np.array([47], I64), zeros(1, 128)),
    "rows: below": lambda: rows(np.array([-1], I64), zeros(1, 128)),
    "rows: huge": lambda: rows(np.array([1 << 62], I64), zeros(1, 128)),
    "rows: dtype": lambda: rows(np.array([1], I32), zeros(1, 128)),
    "rows: out": lambda: rows(np.array([1], I64), zeros(2, 128)),
    "tokens: above": lambda: ffn(zeros(2, 128), [2], [0], zeros(2, 2, 128)),
    "tokens: below": lambda: ffn(zeros(2, 128), [-1], [0], zeros(2, 2, 128)),
    "ranks: above": lambda: ffn(zeros(2, 128), [1], [2], zeros(2, 2, 128)),
    "ranks: count": lambda: ffn(zeros(2, 128), [1], [0, 1], zeros(2, 2, 128)),
    "expert out: size": lambda: ffn(zeros(2, 128), [1], [0], zeros(2, 2, 64)),
    "expert out: tokens": lambda: ffn(zeros(2, 128), [1], [0], zeros(1, 2, 128)),
    "expert: shapes": lambda: kernels.Expert(matrix_of(FFN[0]), matrix_of(FFN[1]), matrix_of(FFN[1])),
    "expert: activation": lambda: kernels.Expert(*(matrix_of(part) for part in FFN), activation="tanh"),
    "combine: weights": lambda: kernels.combine(zeros(2, 3, 4), zeros(2, 2), zeros(2, 4)),
    "combine: out": lambda: kernels.combine(zeros(2, 3, 4), zeros(2, 3), zeros(2, 5)),
    "norm: weight": lambda: kernels.rms_norm(zeros(2, 4), zeros(3), 1e-5, zeros(2, 4)),
    "norm: out": lambda: kernels.rms_norm(zeros(2, 4), zeros(4), 1e-5, zeros(2, 3)),
    "layer norm: weight": lambda: kernels.layer_norm(zeros(2, 4), zeros(3), zeros(4), 1e-5, zeros(2, 4)),
    "layer norm: bias": lambda: kernels.layer_norm(zeros(2, 4), zeros(4), zeros(5), 1e-5, zeros(2, 4)),
    "layer norm: out": lambda: kernels.layer_norm(zeros(2, 4), zeros(4), zeros(4), 1e-5, zeros(3, 4)),
    "rope: position": lambda: rope(5),
    "rope: negative": lambda: rope(-1),
    "rope: too many features": lambda: rope(0, half=5),
    "store: slot": lambda: store(2, 0),
    "store: position": lambda: store(0, 5),
    "store: heads": lambda: store(0, 0, heads=3),
    "store: two types": lambda: store(0, 0, other=np.float16),
    "store: doubles": lambda: store(0, 0, kind=np.float64, other=np.float64),
    "attention: two types": attend_mixed,
    "attention: heads": lambda: attend(heads=3),
    "attention: no heads": lambda: attend(kv_heads=0),
    "attention: size": lambda: attend(size=16),
    "attention: slot": lambda: attend(slot=2),
    "attention: position": lambda: attend(position=5),
    "attention: negative": lambda: attend(position=-1),
    "attention: window": lambda: attend(window=-1),
    "attention: no end": lambda: attend(ends=np.array([0], I32)),
    "attention: end after the cache": lambda: attend(ends=np.array([6], I32)),
    "attention: ends": lambda: attend(ends=np.array([1, 1], I32)),
    "attention: ends and a window": lambda: attend(ends=np.array([1], I32), window=2),
    "attention: bias of other positions": lambda: attend(bias=zeros(4, 10)),
    "attention: bias of other heads": lambda: attend(bias=zeros(2, 9)),
    "expert: a gate too many": lambda: kernels.Expert(*(matrix_of(part) for part in FFN), activation="relu"),
    "expert: no gate": lambda: kernels.Expert(None, *(matrix_of(part) for part in FFN[1:])),
    "route: too many": lambda: kernels.route(zeros(2, 4), 5, True),
    "route: none": lambda: kernels.route(zeros(2, 4), 0, True),
    "route: dtype": lambda: kernels.route(zeros(2, 4, dtype=np.float64), 1, True),
}


@pytest.mark.parametrize("case", CASES)
def test_arguments_are_refused(every: str, case: str) -> None:
    with pytest.raises(ValueError, match=r"expected .*found|expected"):
        CASES[case]()


def test_read_only_outputs_are_refused(native: str) -> None:
    out = zeros(2, 33)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        linear(zeros(2, 128), out)


def test_overlapping_arrays_are_refused(native: str) -> None:
    memory = zeros(2, 128)
    with pytest.raises(ValueError, match="separate"):
        linear(memory, memory.reshape(-1)[:66].reshape(2, 33))


def test_outputs_of_several_products_must_be_as_many_and_apart(every: str) -> None:
    packed = random_matrix(4, 64, QuantSpec.parse("q4g32"))
    matrix = kernels.PackedMatrix(packed.data, 4, 64, packed.spec)
    x, out = zeros(1, 64), zeros(1, 4)
    for matrices, outs in (([], []), ([matrix], []), ([matrix] * 9, [zeros(1, 4) for _ in range(9)])):
        with pytest.raises(ValueError, match="as many"):
            kernels.linears(matrices, x, outs)
    if every != "numpy":
        with pytest.raises(ValueError, match="separate"):
            kernels.linears([matrix, matrix], x, [out, out])


def test_other_objects_are_refused(native: str) -> None:
    with pytest.raises(ValueError, match="array"):
        linear([1.0, 2.0], zeros(2, 33))  # type: ignore[arg-type]


def test_numbers_that_are_not_finite_do_no_harm(every: str) -> None:
    spec = QuantSpec.parse("q4g32")
    data = np.full(spec.packed_bytes(33, 128), 0xFF, np.uint8)  # scales and minima are NaN
    out = zeros(3, 33)
    kernels.linear(kernels.PackedMatrix(data, 33, 128, spec), np.full((3, 128), np.inf, F32), out)
    assert np.isnan(out).all()
