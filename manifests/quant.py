"""Formats of weight matrices, and the only arithmetic of their packed sizes.

A packed matrix has `rows` x `columns` weights. Rows are padded with zeros to a multiple of ROWS_PER_BLOCK.
The byte layout (`rows16`) is specified in docs/format.md, section Packing. This module only computes sizes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

LAYOUT = "rows16"
ROWS_PER_BLOCK = 16
COLUMNS_PER_TILE = 32
PRUNED = 0
"""Value instead of a bitwidth for experts that are left out: no bytes, no computation, no contribution."""
TERNARY = 1.6
"""Value instead of a bitwidth for codes 0, 1 and 2, five of which are stored in a byte."""
BITWIDTHS: tuple[float, ...] = (1, TERNARY, 2, 3, 4, 5, 6, 8, 16)
BITWIDTHS_OF_VERSION_2 = (5, 6)
"""Bitwidths that the first version of the bundle format does not have."""
UNIT_ALIGNMENT_BYTES = 64
EXPERT_ALIGNMENT_BYTES = 4096
MAX_DIMENSION = 1 << 24

MXFP4_GROUP_SIZE = 32
MXFP4_EXPONENTS = (2, 254)
"""Range of the scales that kernels can halve and still have normal floats."""

FloatType = Literal["none", "bfloat16", "float16", "mxfp4"]
TERNARY_COLUMNS = 64
"""Columns of a tile of ternary values."""
# 3 bytes for each of four columns, which hold 15 codes, and 1 byte for the four sixteenth codes.
_TERNARY_TILE_ROW_BYTES = 13
BYTE_SCALES_BITWIDTHS = (1, 2, 3, 4, 5)
BYTE_SCALES_EXPONENTS = (103, 135)
"""Range of the stored exponents of byte scales: 2^-24 to 2^8, so that half precision can hold every scale."""
_SPLIT_CODES: dict[int, tuple[int, ...]] = {3: (2, 1), 5: (4, 1), 6: (4, 2)}
SHORT_FORM = r"q(1\.6|[1234568])(?:g([0-9]{1,8}))?([sb]?)"
_SHORT = re.compile(SHORT_FORM)


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """Storage format of one matrix.

    bitwidth: 1 to 6 or 8 for codes with scales, TERNARY, 16 for the checkpoint's own floats, or PRUNED.
    group_size: columns that share one scale, a multiple of 32, with TERNARY of 64; 0 means one scale per row.
    symmetric: w = scale * (code - centre), never with 1 bit, always with TERNARY. Otherwise w = scale * code + minimum.
    float_type: the 16-bit type, `mxfp4`, or `none` for integer codes.
    byte_scales: for asymmetric groups of up to 5 bits. Scales and minima are bytes, in multiples of a power of two of
        each row. No minimum is above 0.
    Raises ValueError if a field is out of range.

    With PRUNED nothing is stored. It applies to all projections of an expert or to none.
    With `mxfp4` the codes of 4 bits are floats (E2M1), and the scale of 32 columns is a power of two (E8M0). They are
    the checkpoint's own values.
    """

    bitwidth: float
    group_size: int = 0
    symmetric: bool = False
    float_type: FloatType = "none"
    byte_scales: bool = False

    def __post_init__(self) -> None:
        if self.bitwidth != PRUNED and self.bitwidth not in BITWIDTHS:
            raise ValueError(f"bitwidth must be one of {BITWIDTHS}, found {self.bitwidth}")
        if (self.bitwidth == 16) != (self.float_type in ("bfloat16", "float16")):
            raise ValueError("a 16-bit float_type belongs to bitwidth 16 and to no other")
        if self.is_mxfp4 and (self.bitwidth, self.group_size, self.symmetric) != (4, MXFP4_GROUP_SIZE, False):
            raise ValueError(f"mxfp4 has 4 bits in groups of {MXFP4_GROUP_SIZE}, and no minima")
        if self.bitwidth in (16, PRUNED) and (self.group_size or self.symmetric):
            raise ValueError("a 16-bit matrix, or one that is left out, has no groups")
        if self.bitwidth == 1 and self.symmetric:
            raise ValueError("a symmetric matrix of 1 bit has no weight above 0")
        if self.is_ternary and not self.symmetric:
            raise ValueError(f"a matrix of {TERNARY} bits is symmetric: -1, 0 and 1 times a scale")
        if self.byte_scales and not (
            self.bitwidth in BYTE_SCALES_BITWIDTHS and self.group_size and not self.symmetric and not self.is_mxfp4
        ):
            raise ValueError("scales in bytes belong to groups of 1 to 5 bits with minima")
        if self.group_size < 0 or self.group_size > MAX_DIMENSION or self.group_size % self.tile_columns:
            raise ValueError(f"group_size must be 0 or a multiple of {self.tile_columns}, found {self.group_size}")

    @property
    def is_mxfp4(self) -> bool:
        """True if codes are 4-bit floats with scales that are powers of two."""
        return self.float_type == "mxfp4"

    @property
    def is_pruned(self) -> bool:
        """True if nothing is stored, and every weight counts as 0."""
        return self.bitwidth == PRUNED

    @property
    def is_ternary(self) -> bool:
        """True if weights are -1, 0 or 1 times a scale."""
        return self.bitwidth == TERNARY

    @property
    def largest_code(self) -> int:
        """Largest code; the smallest is 0. For formats below 16 bits."""
        return 2 if self.is_ternary else 2 ** int(self.bitwidth) - 1

    @property
    def centre(self) -> int:
        """Code of the weight 0 in symmetric formats."""
        return 1 if self.is_ternary else 2 ** int(self.bitwidth - 1)

    @property
    def plane_bits(self) -> tuple[int, ...]:
        """Bits of a code that a tile's planes hold together, lowest first. For formats with whole bits."""
        bits = int(self.bitwidth)
        return _SPLIT_CODES.get(bits, (bits,))

    @property
    def format_version(self) -> int:
        """First version of the bundle format that has this format."""
        return 2 if self.bitwidth in BITWIDTHS_OF_VERSION_2 else 1

    @property
    def tile_columns(self) -> int:
        """Columns of a tile. A group has a whole number of tiles."""
        return TERNARY_COLUMNS if self.is_ternary else COLUMNS_PER_TILE

    @property
    def tile_row_bytes(self) -> int:
        """Bytes of one row's codes in a tile."""
        return _TERNARY_TILE_ROW_BYTES if self.is_ternary else int(self.bitwidth) * COLUMNS_PER_TILE // 8

    def __str__(self) -> str:
        if self.is_mxfp4:
            return "mxfp4"
        if self.bitwidth == 16:
            return "bf16" if self.float_type == "bfloat16" else "fp16"
        group = f"g{self.group_size}" if self.group_size else ""
        return f"q{self.bitwidth:g}{group}{'s' if self.symmetric else 'b' if self.byte_scales else ''}"

    @classmethod
    def parse(cls, text: str) -> QuantSpec:
        """Read the short form (`q4g64`, `q8`, `q2s`, `q2g32b`, `q1.6g128s`, `q0`, `bf16`). Raises ValueError."""
        if text == "mxfp4":
            return cls(4, MXFP4_GROUP_SIZE, float_type="mxfp4")
        if text in ("bf16", "fp16"):
            return cls(16, float_type="bfloat16" if text == "bf16" else "float16")
        match = _SHORT.fullmatch(text)
        if text == "q0":
            return cls(PRUNED)
        if match is None:
            raise ValueError(f"not a format: `{text[:40]}` (expected a form like `q4g64`, `q8s`, `bf16`)")
        bitwidth = TERNARY if "." in match[1] else int(match[1])
        return cls(bitwidth, int(match[2] or 0), match[3] == "s", byte_scales=match[3] == "b")

    def groups(self, columns: int) -> int:
        """Return the groups per row; 0 for 16-bit matrices and pruned ones."""
        if self.bitwidth in (16, PRUNED):
            return 0
        return columns // self.group_size if self.group_size else 1

    def fits(self, columns: int) -> bool:
        """Return whether rows of `columns` weights can be stored in this format."""
        if self.bitwidth in (16, PRUNED):
            return columns > 0
        return columns > 0 and columns % self.tile_columns == 0 and columns % (self.group_size or 1) == 0

    def bits_per_weight(self, columns: int) -> float:
        """Return the stored bits of one weight, with scales and minima, without row padding."""
        return 8 * self.row_bytes(columns) / columns

    def row_bytes(self, columns: int) -> float:
        """Return the bytes of one row; a whole number for all formats that fit."""
        codes = columns / self.tile_columns * self.tile_row_bytes
        return codes + self.groups(columns) * self.group_header_bytes + self.block_header_bytes

    @property
    def block_header_bytes(self) -> int:
        """Bytes of one row at the start of its row block: the exponents of byte scales and minima."""
        return 2 if self.byte_scales else 0

    @property
    def group_header_bytes(self) -> int:
        """Bytes of one row's scale and minimum of a group: half-precision values, bytes, or the exponent of mxfp4."""
        if self.is_mxfp4:
            return 1
        return 2 if self.symmetric or self.byte_scales else 4

    def packed_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a packed matrix with row padding. Raises ValueError if the columns do not fit."""
        if not self.fits(columns):
            raise ValueError(f"format {self} cannot hold rows of {columns} weights")
        if not 0 < rows <= MAX_DIMENSION:
            raise ValueError(f"rows out of range: {rows}")
        codes = columns * self.tile_row_bytes // self.tile_columns
        headers = self.groups(columns) * self.group_header_bytes + self.block_header_bytes
        return round_up(rows, ROWS_PER_BLOCK) * (codes + headers)
