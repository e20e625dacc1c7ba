"""HOBBIT's thresholds T1 and T2, decided in this file alone: by calibration for a bundle, by measured losses for a run.

The unimportance of a chosen expert is the share of its token's weight in better-ranked experts. Up to T1 an expert is
read in its high version, up to T2 in its low version, and above T2 not at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

HOBBIT_SHARES = (0.67, 0.97)
"""Shares of the chosen experts up to T1 and up to T2: 67 % high, 30 % low, 3 % skipped. Source: HOBBIT, evaluation."""


def calibrated_thresholds(counts: Sequence[int]) -> list[float]:
    """Return T1 and T2 at which calibration has HOBBIT's shares of versions, or an empty list without counts.

    counts: chosen experts by unimportance, in even bins from 0 to 1.
    """
    return unimportance_quantiles(counts, HOBBIT_SHARES)


def unimportance_quantiles(counts: Sequence[int], shares: Sequence[float]) -> list[float]:
    """Return the values below which these shares of the counts lie, or an empty list without counts."""
    totals = list(accumulate(counts))
    if not totals or not totals[-1]:
        return []
    return [(bisect_left(totals, share * totals[-1]) + 0.5) / len(counts) for share in shares]


def best_thresholds(rows: list[dict[str, Any]], loss: float, low_share: float) -> dict[str, Any] | None:
    """Return the row of dynamic precision that leaves the most bytes unread within a loss; None without one.

    Only rows with dynamic precision alone count, whose upper bound of the loss is at most `loss`.
    rows: measured settings of a bundle, see runtime/tuning/mode_records.py.
    low_share: size of a low version, as a share of the high version.
    """
    candidates = [
        row for row in rows if set(row["options"]) == {"dynamic_precision"} and row["loss"]["upper95"] <= loss
    ]
    return max(candidates, key=lambda row: saved_share(row, low_share), default=None)


def saved_share(row: dict[str, Any], low_share: float) -> float:
    """Return the bytes that a row leaves unread, as a share of the bytes of all experts that its tokens chose.

    A low version counts as read, although it may have been cached.
    """
    shares = row["decisions"]
    return float(shares["skipped_share"] + shares["low_share"] * (1 - low_share))
