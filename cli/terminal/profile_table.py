"""Time of a token by kernel: `moec bench --profile`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import output

if TYPE_CHECKING:
    from moec.runtime.kernels.profile import KernelTimes
    from moec.runtime.trace.statistics import RunStatistics

WAITING, PYTHON = "waiting for experts", "Python and numpy"
WAITS = "experts_layer"
"""The kernel that includes a token's waits, if the run uses it."""


def profile_rows(times: KernelTimes, statistics: RunStatistics) -> list[dict[str, Any]]:
    """Return a row per kernel, longest first, then the wait for experts, then the rest, which is Python.

    The shares add up to 1. Time of an accelerator counts as Python.
    times: times of the tokens after the first.
    """
    shares, rate, tokens = statistics.decode_shares, statistics.tokens_per_s, statistics.tokens - 1
    if shares is None or rate is None:
        return []
    token_ns = 1e9 / rate
    waiting_ns = shares.stall * token_ns
    own_ns = {name: elapsed_ns / tokens for name, elapsed_ns in times.elapsed_ns.items()}
    if WAITS in own_ns:
        own_ns[WAITS] -= waiting_ns
    longest = sorted(own_ns, key=lambda name: -own_ns[name])
    found = [(name, times.calls[name] / tokens, own_ns[name]) for name in longest]
    left_ns = token_ns - waiting_ns - sum(own_ns.values())
    rows = [*found, (WAITING, None, waiting_ns), (PYTHON, None, left_ns)]
    return [
        {"part": name, "calls_per_token": calls, "ns_per_token": ns, "share": ns / token_ns} for name, calls, ns in rows
    ]


def profile_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a text table."""
    cells = [
        [
            row["part"],
            "" if row["calls_per_token"] is None else f"{row['calls_per_token']:g}",
            f"{row['ns_per_token'] / 1e6:.3f} ms",
            output.human_share(row["share"]),
        ]
        for row in rows
    ]
    return output.table(cells, ["of a token", "calls", "time", "share"])
