"""The predicted speed of the bundle of each device on each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import output

_LITTLE = 1.01
"""Ratio of two predicted times that counts as equal."""


def device_table(predicted: Sequence[Mapping[str, Any]], expert_bytes: Mapping[str, int]) -> str:
    """Return a row per bundle and a column per device.

    predicted: `device` and `token_ns` by device, of each bundle.
    expert_bytes: packed bytes of the routed experts, by device.
    """
    devices = [str(row["device"]) for row in predicted]
    header = ("bundle for", "expert bytes", *(f"predicted TPOT on {name}" for name in devices))
    rows = [
        (row["device"], f"{expert_bytes[row['device']]:,}", *(_time(row["token_ns"][name]) for name in devices))
        for row in predicted
    ]
    return output.table(rows, header)


def device_sentences(predicted: Sequence[Mapping[str, Any]], expert_bytes: Mapping[str, int]) -> list[str]:
    """Return a sentence for each device on which the bundle of another device is predicted to be faster, and why."""
    by_device = {str(row["device"]): row["token_ns"] for row in predicted}
    sentences = []
    for name, own in by_device.items():
        fitting = {other: times[name] for other, times in by_device.items() if times[name] is not None}
        best = min(fitting, key=lambda other: fitting[other])
        if own[name] is None or own[name] <= _LITTLE * fitting[best]:
            continue
        fewer = expert_bytes[name] - expert_bytes[best]
        reason = f"it has {fewer:,} expert bytes less" if fewer > 0 else "its popular experts are smaller"
        sentences.append(
            f"on {name} the bundle for {best} is predicted to be faster, {_time(fitting[best])} against "
            f"{_time(own[name])}: {reason}; trials of both plans keep the target"
        )
    return sentences


def _time(token_ns: int | None) -> str:
    return "does not fit" if token_ns is None else f"{token_ns / 1e6:.2f} ms"
