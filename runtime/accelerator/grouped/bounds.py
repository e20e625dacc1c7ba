"""Bounds of what this package computes at once, and of the memory for it. Nothing here imports torch."""

from __future__ import annotations

MOST_PAIRS = 4096
"""Most pairs that are computed at once. More are computed in turns, which bounds the memory."""
RECORDED_PAIRS, RECORDED_ROWS = 256, 64
"""Most pairs and rows of a layer that is recorded: powers of two, at least 8."""
FLOAT_BYTES = 4
RECORDED_TABLE_BYTES = 1 << 17
"""Space for the table of a recorded layer. A layer of more jobs is not recorded."""
JOB_FIELDS = 5
"""Fields of a job, int64 each: address of the matrix or 0, address of its bias or 0, first pair, number of pairs, and
what is added to a pair for the row of its result."""
_JOB_BYTES = 3 * 8 * JOB_FIELDS
"""Bytes of the jobs of a pair: one for each of three matrices."""


def scratch_bytes(pairs: int, rows: int, hidden: int, width: int) -> int:
    """Return an upper bound of the device bytes between the steps, without results, and of recorded layers.

    pairs: tokens of all experts together. rows: tokens of the layer.
    hidden, width: columns of rows, and most rows of gate and up.
    """
    pairs, recorded = min(pairs, MOST_PAIRS), RECORDED_PAIRS * (3 * width + hidden) + 2 * RECORDED_ROWS * hidden
    table = pairs * (3 * 8 + _JOB_BYTES) + 8 * rows
    return FLOAT_BYTES * (3 * pairs * width + 2 * rows * hidden + recorded) + table + RECORDED_TABLE_BYTES


def recorded_bytes(hidden: int) -> int:
    """Return the bytes of what a recorded layer is given: rows and table. The host has as many, and the results."""
    return FLOAT_BYTES * RECORDED_ROWS * hidden + RECORDED_TABLE_BYTES


def pinned_bytes(hidden: int) -> int:
    """Return the bytes of pinned host memory for recorded layers."""
    return recorded_bytes(hidden) + FLOAT_BYTES * RECORDED_PAIRS * hidden
