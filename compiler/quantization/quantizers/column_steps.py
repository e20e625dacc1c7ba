"""Steps of the quantizers between matrix products: C++ on the CPU, torch elsewhere and without the extension.

Both agree up to float32 rounding. Matrices are stored column by column, so that neighbours in memory are rows.
Shapes: N rows, K columns, G groups, M rows of several matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from moec.runtime.kernels import extension

BLOCK_COLUMNS = 64
"""Columns that `round_columns` takes at most."""


def native_of(tensor: Tensor) -> ModuleType | None:
    """Return the extension if it computes on a tensor; None if torch does."""
    return extension.compiled() if tensor.device.type == "cpu" else None


def code_sums(products: Tensor, codes: Tensor, centre: float, groups: int) -> Tensor:
    """Sum products * (codes - centre) over groups of columns: float32 and uint8 [K, N] -> [G, N]."""
    native = native_of(products)
    if native is None:
        return (products * codes.float().sub_(centre)).reshape(groups, -1, products.shape[1]).sum(1)
    sums = products.new_empty(groups, products.shape[1])
    native.code_sums(products.numpy(), codes.numpy(), centre, sums.numpy())
    return sums


def differences(
    weights: Tensor, codes: Tensor, scales: Tensor, minima: Tensor, places: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return D = scale * code + minimum - weight, float32 [K, N], and its sums of squares, float64 [N].

    weights: float32 [K, N].
    codes: uint8 [K, N].
    scales, minima: float32 [G, N].
    places: int64 [K], the row of D that holds each column. None: D is returned empty.
    """
    native, given = native_of(weights), (weights, codes, scales, minima)
    out = weights.new_empty(0) if places is None else torch.empty_like(weights)
    if native is None:
        grouped = codes.reshape(len(scales), -1, codes.shape[1]).float()
        difference = torch.addcmul(minima[:, None], grouped, scales[:, None]).reshape(weights.shape).sub_(weights)
        if places is not None:
            out.index_copy_(0, places, difference)
        return out, difference.square_().sum(0, dtype=torch.float64)
    squares = weights.new_empty(weights.shape[1], dtype=torch.float64)
    optional = (None, None) if places is None else (places.numpy(), out.numpy())
    native.differences(*(tensor.numpy() for tensor in given), *optional, squares.numpy())
    return out, squares


def round_columns(
    work: Tensor,
    factor: Tensor,
    order: Tensor,
    grid: Sequence[Tensor],
    start: int,
    end: int,
    codes: Tensor,
    squares: Tensor,
) -> None:
    """Round columns from `start` to `end` one after the other, each with the errors of those before it.

    work: weights, float32 [K, M], in the order of GPTQ. These columns then hold errors over the diagonal of the factor.
    factor: U^T, float32 [K, K], lower triangular.
    order: int64 [K].
    grid: scales, their inverses and minima, [G, M], float32, and largest codes, uint8 [M].
        A scale of 0 has the inverse 1.
    codes: uint8 [K, M], filled at order[start:end].
    squares: float64 [M], to which squares of the errors are added.
    """
    native = native_of(work)
    if native is not None:
        native.round_columns(
            *(tensor.numpy() for tensor in (work, factor, order, *grid)),
            start, end, codes.numpy(), squares.numpy(),
        )  # fmt: skip
        return
    scales, inverses, minima, largest = grid
    groups = (order[start:end] // (len(work) // len(scales))).cpu().tolist()
    rounded, value = work.new_empty(end - start, work.shape[1]), work.new_empty(work.shape[1])
    highest, diagonal = largest.float(), factor.diagonal()[start:end].cpu().tolist()
    for column, group, entry, code in zip(range(start, end), groups, diagonal, rounded.unbind(), strict=True):
        weight = work[column]
        torch.sub(weight, minima[group], out=code).mul_(inverses[group]).round_().clamp_min_(0.0)
        torch.minimum(code, highest, out=code)
        torch.addcmul(minima[group], code, scales[group], out=value)
        weight.sub_(value).div_(entry)
        if column + 1 < end:
            work[column + 1 : end].addr_(factor[column + 1 : end, column], weight, alpha=-1.0)
    codes[order[start:end]] = rounded.to(torch.uint8)
    squares += work[start:end].square().sum(0, dtype=torch.float64)


def code_systems(codes: Tensor, centre: float, moment: Tensor, sums: Tensor, start: int, systems: Tensor) -> None:
    """Fill the first G rows of least squares of some rows, float32 [P, P, n], on and above the diagonals.

    Entries of the first G columns: H with codes as factors on both sides, summed over pairs of groups.
    Entries of further columns: `sums` with codes as factors, summed over groups.
    codes: uint8 [K, N], those of the rows from `start` on; centre: what is subtracted from them.
    moment: H, float32 [K, K], symmetric.
    sums: of H over groups of columns, float32 [G, K], or [0, K]: then there are no further columns.
    """
    native = native_of(codes)
    if native is not None:
        native.code_systems(codes.numpy(), centre, moment.numpy(), sums.numpy(), start, systems.numpy())
        return
    groups, rows = len(sums) or len(systems), systems.shape[2]
    factors = codes[:, start : start + rows].float().sub_(centre).reshape(groups, -1, rows)
    width = factors.shape[1]
    for group in range(groups):
        product = moment[group * width :, group * width : (group + 1) * width] @ factors[group]
        systems[group, group:groups] = (product.reshape(-1, width, rows) * factors[group:]).sum(1)
    systems[:groups, groups:] = sums.reshape(-1, groups, width).transpose(0, 1) @ factors


def multiplied(systems: Tensor, x: Tensor) -> Tensor:
    """Return S x of symmetric matrices: float32 [P, P, n] and [P, n] -> [P, n]. What is below diagonals is not read."""
    native = native_of(systems)
    if native is None:
        return (_whole(systems) @ x.T[..., None])[..., 0].T.contiguous()
    out = torch.empty_like(x)
    native.multiply_systems(systems.numpy(), x.numpy(), out.numpy())
    return out


def solved(systems: Tensor, diagonal: Tensor, right: Tensor) -> Tensor:
    """Return x with (S + diagonal) x = right for S as in `multiplied`, positive semidefinite; all others [P, n]."""
    native = native_of(systems)
    if native is None:
        raised = _whole(systems)
        raised.diagonal(dim1=1, dim2=2).add_(diagonal.T)
        found: Tensor = torch.linalg.solve(raised, right.T).T
        return found.contiguous()
    x = right.clone(memory_format=torch.contiguous_format)
    native.solve_systems(systems.numpy(), diagonal.numpy(), x.numpy())
    return x


def _whole(systems: Tensor) -> Tensor:
    """Return symmetric matrices [n, P, P]."""
    upper = systems.permute(2, 0, 1).triu()
    return upper + upper.triu(1).transpose(1, 2)
