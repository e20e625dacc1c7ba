"""Bounds of what `grouped_experts.py` computes at once, and of the memory for it. Nothing here imports torch."""

from __future__ import annotations

MOST_PAIRS = 4096
"""Most pairs that are computed at once. More are computed in turns, which bounds the memory."""
RECORDED_PAIRS, RECORDED_ROWS = 256, 64
"""Most pairs and rows of a layer that is recorded."""
FLOAT_BYTES = 4
RECORDED_TABLE_BYTES = 1 << 17
"""Space for the table of a recorded layer. A layer of more jobs is not recorded."""
_JOB_BYTES = 3 * 5 * 8
"""Bytes of the jobs of a pair: one of five numbers for each of three matrices."""


def scratch_bytes(pairs: int, rows: int, hidden: int, width: int) -> int:
    """Return an upper bound of the device bytes between the steps, without results, and of a recorded layer."""
    pairs, recorded = min(pairs, MOST_PAIRS), RECORDED_PAIRS * (3 * width + hidden) + 2 * RECORDED_ROWS * hidden
    table = pairs * (3 * 8 + _JOB_BYTES) + 8 * rows
    return FLOAT_BYTES * (3 * pairs * width + 2 * rows * hidden + recorded) + table + RECORDED_TABLE_BYTES
