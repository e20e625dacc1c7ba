"""Unpack packed matrices with torch, on any of its devices, and compute one expert with them, without Triton.

Unpacking gives the same bits as `kernels.packed_matrix.unpack`.

scale * code is exact in float32 (11 and at most 8 significant bits). So only the sum rounds, as in the kernels.
The layout is that of docs/format.md, Packing; the sizes are those of `manifests.quant`.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from moec.manifests.quant import COLUMNS_PER_TILE, ROWS_PER_BLOCK, QuantSpec, round_up

from ..kernels.packed_matrix import MXFP4_CENTRE, MXFP4_LEVELS
from ..kernels.reference import SWIGLU_SLOPE
from .image import ExpertForm, MatrixForm

_PLANE_BYTES = 4 * ROWS_PER_BLOCK
_COLUMNS_PER_LANE = 4
_TERNARY_PLANES, _TERNARY_DIGITS = 3, 5
_FRACTION_BITS = 23
_SMALLEST_ROUNDED = 2.0**-110  # as in the kernels: 127 divided by less could overflow


@lru_cache
def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    """Return the first bit of each field of a byte, uint8 [8 / bits, 1].

    It is cached, because making it would wait for the device.
    """
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device).unsqueeze(-1)


@lru_cache
def _mxfp4_levels(device: torch.device) -> torch.Tensor:
    return torch.tensor(MXFP4_LEVELS.tolist(), dtype=torch.uint8, device=device)


def _fields(planes: torch.Tensor, bits: int) -> torch.Tensor:
    """Split bytes into fields of `bits` bits, lowest first.

    planes: uint8 [n, planes, 64].
    Returns uint8 [n, planes x 8 / bits, 64].
    """
    fields: torch.Tensor = (planes.unsqueeze(2) >> _shifts(bits, planes.device)) & (2**bits - 1)
    return fields.reshape(len(planes), -1, _PLANE_BYTES)


def _ternary_lanes(tiles: torch.Tensor) -> torch.Tensor:
    """Return the codes of tiles of ternary values: uint8 [n, 208] -> uint8 [n, 16, 64]."""
    digits, split = [], _TERNARY_PLANES * _PLANE_BYTES
    fractions = tiles[:, :split].reshape(-1, _TERNARY_PLANES, 1, _PLANE_BYTES).to(torch.int16)
    for _ in range(_TERNARY_DIGITS):
        fractions = fractions * 3
        digits.append((fractions >> 8).to(torch.uint8))
        fractions = fractions & 255
    lanes = torch.cat(digits, dim=2).reshape(len(tiles), -1, _PLANE_BYTES)
    last = (tiles[:, split:].unsqueeze(-1) >> _shifts(2, tiles.device).squeeze(-1)) & 3
    return torch.cat((lanes, last.reshape(len(tiles), 1, _PLANE_BYTES)), dim=1)


def _lanes(tiles: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Return the codes of tiles: uint8 [n, bytes] -> uint8 [n, q, 64].

    Byte 4 r + c of lane q is row r, column 4 q + c.
    """
    if spec.is_ternary:
        return _ternary_lanes(tiles)
    planes = tiles.reshape(len(tiles), -1, _PLANE_BYTES)
    low, *high = spec.plane_bits
    lanes = planes if low == 8 else _fields(planes[:, :low], low)
    for bits in high:
        lanes = lanes | _fields(planes[:, low:], bits) << low
    if spec.is_mxfp4:
        return _mxfp4_levels(tiles.device).index_select(0, lanes.reshape(-1).to(torch.int32)).reshape(lanes.shape)
    return lanes


def _halves(data: torch.Tensor) -> torch.Tensor:
    """Convert half-precision floats, stored as bytes [blocks, G, 32], to float32 [blocks, 16, G, 1]."""
    return data.contiguous().view(torch.float16).float().permute(0, 2, 1).unsqueeze(-1)


def _scales(records: torch.Tensor, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return scales and minima of the groups, float32 [blocks, 16, G, 1] each, and the offset of a group's codes."""
    if spec.is_mxfp4:
        # 2^(e - 128) is the float whose exponent field is e - 1; the format has e from 2 to 254.
        fields = (records[:, :, :ROWS_PER_BLOCK].to(torch.int32) - 1) << _FRACTION_BITS
        scales = fields.view(torch.float32).permute(0, 2, 1).unsqueeze(-1)
        return scales, scales * -MXFP4_CENTRE, ROWS_PER_BLOCK
    header = 2 * ROWS_PER_BLOCK
    scales = _halves(records[:, :, :header])
    if spec.symmetric:
        return scales, scales * -spec.centre, header
    return scales, _halves(records[:, :, header : 2 * header]), 2 * header


def _byte_scales(exponents: torch.Tensor, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return `_scales` for byte scales, which are multiples of powers of two.

    exponents: exponents of the powers, uint8 [blocks, 32].
    """
    steps = (exponents.to(torch.int32) << _FRACTION_BITS).view(torch.float32)
    header = 2 * ROWS_PER_BLOCK
    values = (records[:, :, :header] * steps.unsqueeze(1)).permute(0, 2, 1).unsqueeze(-1)
    return values[:, :ROWS_PER_BLOCK], -values[:, ROWS_PER_BLOCK:], header


def unpack(data: torch.Tensor, rows: int, columns: int, spec: QuantSpec) -> torch.Tensor:
    """Return the weights of a packed matrix, each rounded once, float32 [rows, columns], on the same device.

    data: uint8 [packed_bytes], contiguous, starting at an even address.
    Raises ValueError for another size or dtype.
    Source: docs/format.md, Packing.
    """
    expected = spec.packed_bytes(rows, columns)
    if data.dtype != torch.uint8 or data.numel() != expected:
        raise ValueError(f"data: expected {expected} bytes, found {data.numel()} of {data.dtype}")
    if spec.bitwidth == 16:
        values = data.view(torch.bfloat16 if spec.float_type == "bfloat16" else torch.float16).float()
        return values.reshape(-1, columns, ROWS_PER_BLOCK).permute(0, 2, 1).reshape(-1, columns)[:rows]
    blocks, groups = round_up(rows, ROWS_PER_BLOCK) // ROWS_PER_BLOCK, spec.groups(columns)
    by_block, head = data.reshape(blocks, -1), spec.block_header_bytes * ROWS_PER_BLOCK
    records = by_block[:, head:].reshape(blocks, groups, -1)
    scales, minima, start = _byte_scales(by_block[:, :head], records) if head else _scales(records, spec)
    tiles = records[:, :, start:].reshape(-1, ROWS_PER_BLOCK * spec.tile_row_bytes)
    lanes = _lanes(tiles, spec).reshape(blocks, columns // spec.tile_columns, -1, ROWS_PER_BLOCK, _COLUMNS_PER_LANE)
    by_row = lanes.permute(0, 3, 1, 2, 4)
    weights = torch.empty(by_row.shape, dtype=torch.float32, device=data.device).copy_(by_row)
    # In place: at this moment it is the largest tensor on the device.
    grouped = weights.view(blocks, ROWS_PER_BLOCK, groups, -1).mul_(scales).add_(minima)
    return grouped.view(-1, columns)[:rows]


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """Round rows, float32 [T, K], to 8 bits per 32 columns, as every quantized matrix reads them on the CPU."""
    tiles = x.reshape(len(x), -1, COLUMNS_PER_TILE)
    largest = tiles.abs().amax(dim=-1, keepdim=True)
    # Divide by a tensor, not by a number. For a number torch multiplies by its reciprocal, which rounds twice.
    most = torch.full_like(largest, 127.0)
    inverse = torch.where(largest >= _SMALLEST_ROUNDED, most / largest, 0.0)
    codes = torch.round((tiles * inverse).clamp_(-127, 127))
    steps = torch.where(torch.isfinite(largest), largest, torch.nan) / most
    return (codes * steps).reshape(x.shape)


class LayerRows:
    """Rows of a layer, float32 [T, D], and their rounded form, which is made once for all experts."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.plain = rows
        self._rounded: torch.Tensor | None = None

    def read_by(self, matrix: MatrixForm) -> torch.Tensor:
        """Return the rows as a matrix reads them."""
        if not matrix.reads_rounded:
            return self.plain
        if self._rounded is None:
            self._rounded = round_activations(self.plain)
        return self._rounded


def compute_expert(image: torch.Tensor, form: ExpertForm, rows: LayerRows, at: torch.Tensor) -> torch.Tensor:
    """Return down(activation(gate x, up x)), each product with its bias, float32 [n, D].

    image: bytes of the expert, uint8 [n].
    at: rows of the layer, int64 [n].
    """
    products = []
    biases = [image[start:end].view(torch.float32) for start, end in form.biases]
    for number, matrix in enumerate((form.gate or form.up, form.up)):
        if form.gate is None and number == 0:  # relu uses up alone
            continue
        product = rows.read_by(matrix).index_select(0, at) @ _weights(image, matrix).T
        products.append(product + biases[number] if biases else product)
    hidden = _activate(products, form.activation, form.limit)
    if form.down.reads_rounded:
        hidden = round_activations(hidden)
    out = hidden @ _weights(image, form.down).T
    return out + biases[2] if biases else out


def _weights(image: torch.Tensor, matrix: MatrixForm) -> torch.Tensor:
    return unpack(image[matrix.start : matrix.end], matrix.rows, matrix.columns, matrix.spec)


def _activate(products: list[torch.Tensor], activation: str, limit: float) -> torch.Tensor:
    """Return the input of down; see `kernels.reference.gated`.

    products: of gate and up, or of up alone.
    """
    if activation == "relu":
        return products[-1].clamp_min(0)
    gate, up = products
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    g, u = gate.clamp_max(limit), up.clamp(-limit, limit)
    return (u + 1) * (g / (1 + torch.exp(-float(SWIGLU_SLOPE) * g)))
