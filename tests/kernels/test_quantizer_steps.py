"""Steps of a quantizer: the same bits from every instruction set (G8), and arguments that are refused (G10).

Their meaning is compared with torch in tests/compiler/quantization/test_column_steps.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from moec.runtime import kernels
from tests.kernels.conftest import need
from tests.kernels.packer import bits
from tests.kernels.products import gate

F32 = np.float32
FACTORS = np.linspace(0.95, 0.4, 12, dtype=F32)
GRIDS = ((1, 0, False, False), (2, 1, True, True), (7, 0, False, False), (15, 8, True, False), (255, 0, False, False))
"""Largest code, centre, symmetric, three values."""


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([*shape, seed]).standard_normal(shape).astype(F32)


def native() -> Any:
    need("scalar")
    return kernels.loaded()


def searched(columns: int, rows: int, groups: int, grid: tuple[int, int, bool, bool]) -> list[np.ndarray]:
    """Return scales and minima, codes, differences in reversed order, and their squares."""
    weights, shares = normal(columns, rows) * F32(0.02), np.abs(normal(columns))
    weights[: columns // groups, 0] = 0
    scales, minima, codes = normal(groups, rows), normal(groups, rows), np.zeros((columns, rows), np.uint8)
    native().search_ranges(weights, shares, FACTORS, *grid, scales, minima)
    native().nearest_codes(weights, scales, minima, grid[0], codes)
    out, squares = np.zeros_like(weights), np.zeros(rows)
    native().differences(weights, codes, scales, minima, np.arange(columns)[::-1].copy(), out, squares)
    return [scales, minima, codes.astype(F32), out, squares.astype(F32)]


def columns_of_gptq(columns: int, rows: int, groups: int) -> list[np.ndarray]:
    work, factor = normal(columns, rows), np.tril(normal(columns, columns)) * F32(0.05) + np.eye(columns, dtype=F32)
    scales, minima = np.abs(normal(groups, rows)) * F32(0.3), -np.abs(normal(groups, rows))
    order = np.random.default_rng(0).permutation(columns)
    largest = np.resize(np.array([1, 2, 3, 15, 255], np.uint8), rows)
    codes, squares = np.zeros((columns, rows), np.uint8), np.ones(rows)
    for start in range(0, columns, 40):
        end = min(start + 40, columns)
        native().round_columns(work, factor, order, scales, 1 / scales, minima, largest, start, end, codes, squares)
    return [work, codes.astype(F32), squares.astype(F32)]


def sums(columns: int, rows: int, groups: int) -> list[np.ndarray]:
    out = np.zeros((groups, rows), F32)
    codes = np.random.default_rng(0).integers(0, 16, (columns, rows + 3)).astype(np.uint8)
    native().code_sums(normal(columns, rows), codes[:, :rows].copy(), 2.0, out)
    small, large = (np.zeros((size, size, rows), F32) for size in (groups, 2 * groups))
    moment, moment_sums = normal(columns, columns), normal(groups, columns)
    native().code_systems(codes, 2.0, moment, moment_sums[:0], 2, small)
    native().code_systems(codes, 2.0, moment, moment_sums, 2, large)
    return [out, small, large]


def systems(size: int, count: int) -> list[np.ndarray]:
    basis = normal(count, size, size + 2)
    whole = np.ascontiguousarray((basis @ basis.transpose(0, 2, 1)).transpose(1, 2, 0))
    given, out, right = normal(size, count), np.zeros((size, count), F32), normal(size, count, seed=1)
    native().multiply_systems(whole, given, out)
    native().solve_systems(whole, np.ones((size, count), F32), right)
    return [out, right]


def agree(pair: tuple[str, str], compute: Callable[[], Sequence[np.ndarray]]) -> None:
    found = []
    for name in pair:
        kernels.select(name)
        found.append(compute())
    assert all(np.isfinite(part).all() for part in found[0])
    assert all(np.array_equal(bits(one), bits(other)) for one, other in zip(*found, strict=True))


@gate
@pytest.mark.parametrize("rows", [1, 8, 61, 64, 203])
def test_every_instruction_set_has_the_bits_of_scalar(pair: tuple[str, str], rows: int) -> None:
    for columns, groups in ((32, 1), (96, 3), (192, 1), (192, 3)):
        for grid in GRIDS:
            agree(pair, lambda given=(columns, rows, groups, grid): searched(*given))
        agree(pair, lambda given=(columns, rows, groups): columns_of_gptq(*given))
        agree(pair, lambda given=(columns, rows, groups): sums(*given))
    for size in (1, 3, 4, 17):
        agree(pair, lambda size=size: systems(size, rows))


def zeros(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.zeros(shape, dtype)


def search(
    columns: int = 64, groups: int = 2, rows: int = 3, shares: int = 64, factors: int = 2, largest: Any = 3
) -> None:
    grids = zeros(groups, rows), zeros(groups, rows)
    native().search_ranges(zeros(columns, 3), zeros(shares), zeros(factors), largest, 0, False, False, *grids)


def round_some(start: int = 0, end: int = 64, order: int = 0, **changed: np.ndarray) -> None:
    given = {
        "work": zeros(96, 3), "factor": zeros(96, 96), "order": np.full(96, order), "scales": zeros(3, 3),
        "inverses": zeros(3, 3), "minima": zeros(3, 3), "largest": zeros(3, dtype=np.uint8), "start": start, "end": end,
        "codes": zeros(96, 3, dtype=np.uint8), "squares": np.zeros(3),
    } | changed  # fmt: skip
    native().round_columns(*given.values())


def differ(columns: int = 64, groups: int = 2, place: int = 0, rows: int = 3) -> None:
    grids, codes = [zeros(groups, 3), zeros(groups, 3)], zeros(columns, 3, dtype=np.uint8)
    native().differences(zeros(columns, rows), codes, *grids, np.full(columns, place), zeros(columns, 3), np.zeros(3))


def sum_up(groups: int = 2, rows: int = 3, code_rows: int = 3) -> None:
    native().code_sums(zeros(64, 3), zeros(64, code_rows, dtype=np.uint8), 0.0, zeros(groups, rows))


def least_squares(
    columns: int = 64, sums: int = 2, size: int = 4, first: int = 0, rows: int = 3, wide: int = 4
) -> None:
    codes = zeros(columns, 5, dtype=np.uint8)
    native().code_systems(codes, 0.0, zeros(64, 64), zeros(sums, 64), first, zeros(size, wide, rows))


def overlap() -> None:
    whole = zeros(3, 3, 4)
    native().multiply_systems(whole, zeros(3, 4), whole[0])


CASES: dict[str, Callable[[], None]] = {
    "search: groups": lambda: search(groups=3),
    "search: no groups": lambda: search(groups=0),
    "search: more groups than columns": lambda: search(columns=0, shares=0, groups=1),
    "search: rows": lambda: search(rows=4),
    "search: importance": lambda: search(shares=63),
    "search: factors": lambda: search(factors=17),
    "search: largest": lambda: search(largest=256),
    "round: too many": lambda: round_some(end=65),
    "round: beyond": lambda: round_some(start=90, end=97),
    "round: before": lambda: round_some(start=-1, end=3),
    "round: backwards": lambda: round_some(start=4, end=3),
    "round: order": lambda: round_some(order=96),
    "round: order below": lambda: round_some(order=-1),
    "round: factor": lambda: round_some(factor=zeros(96, 95)),
    "round: groups": lambda: round_some(scales=zeros(5, 3)),
    "round: inverses": lambda: round_some(inverses=zeros(1, 3)),
    "round: largest": lambda: round_some(largest=zeros(4, dtype=np.uint8)),
    "round: codes": lambda: round_some(codes=zeros(3, 96, dtype=np.uint8)),
    "round: squares": lambda: round_some(squares=np.zeros(2)),
    "differences: groups of a part of a tile": lambda: differ(columns=48, groups=1),
    "differences: places": lambda: differ(place=64),
    "differences: rows": lambda: differ(rows=4),
    "sums: codes": lambda: sum_up(code_rows=4),
    "sums: groups": lambda: sum_up(groups=3),
    "sums: rows": lambda: sum_up(rows=4),
    "least squares: moment": lambda: least_squares(columns=96),
    "least squares: groups": lambda: least_squares(sums=0, size=3, wide=3),
    "least squares: groups of a part of a tile": lambda: least_squares(sums=0),
    "least squares: size": lambda: least_squares(size=3, wide=3),
    "least squares: not square": lambda: least_squares(wide=3),
    "least squares: rows": lambda: least_squares(first=3),
    "least squares: first": lambda: least_squares(first=-1),
    "systems: not square": lambda: native().multiply_systems(zeros(3, 2, 4), zeros(3, 4), zeros(3, 4)),
    "systems: diagonal": lambda: native().solve_systems(zeros(3, 3, 4), zeros(3, 5), zeros(3, 4)),
}


@pytest.mark.gate("G10")
@pytest.mark.parametrize("case", CASES)
def test_arguments_are_refused(case: str) -> None:
    native()
    with pytest.raises(ValueError, match=r"expected .*found"):
        CASES[case]()


@pytest.mark.gate("G10")
def test_overlapping_memory_is_refused() -> None:
    native()
    with pytest.raises(ValueError, match="separate"):
        overlap()
