"""Overlap of reads and computing.

    python -m bench.yardstick.peers.overlap RESULTS

Prints a Markdown table.

It compares the time per token T of runs of `compare.py` with two bounds of the machine:

* C: time per token with everything in memory, over the same tokens (`memory32`).
* I: bytes per token of the run without prefetch in the same round, divided by the rate of storage.

The rate of storage is the larger of two. One is the rate of this run while a read was under way. The other is the rate
of direct reads in the same group before it. A virtual disk may answer an idle process later or earlier than one that
computes.

If I > C, storage should be busy all the time. If C >= I, reads should overlap completely with computing. Every figure
belongs to a round. The table has medians and spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

OWN, OWN_HALF = "moec", "moec --kv float16"
COLD, NO_ADVICE = "moec, cold start", "moec --set prefetch=off"
SHARES = ("cache-25", "cache-50", "cache-75")
COLUMNS = (
    "compute_ms",
    "reads_ms",
    "over_longer",
    "storage_busy",
    "hidden",
    "bytes_with_prefetch",
    "precision",
    "recall",
)


def run_path(results: Path, condition: str, arm: str, turn: int) -> Path:
    """Return the path of the JSON file of a run."""
    return results / f"{condition}-{arm.replace(',', '').replace(' ', '-')}-{turn}.json"


def runs(results: Path, condition: str, arm: str) -> list[dict[str, Any]]:
    """Return the runs of an arm in the order of the rounds."""
    records: list[dict[str, Any]] = []
    for turn in range(1, 100):
        path = run_path(results, condition, arm, turn)
        if not path.exists():
            return records
        records.append(json.loads(path.read_text(encoding="utf-8")))
    return records


def storage_rate(run: dict[str, Any]) -> float:
    """Return the larger of the run's own rate while it read and the rate of the probe before it, bytes per second."""
    measured = run["measured"]
    read_per_s = measured["decode_bytes_read_per_token"] * measured["tokens_per_s"]
    own_rate: float = read_per_s / measured["decode_shares"]["storage_busy"]
    probed: float = run["probe"]["storage_bytes_per_s"]
    return max(own_rate, probed)


def overlap_of(run: dict[str, Any], without: dict[str, Any], memory: dict[str, Any]) -> dict[str, float]:
    """Return the figures of one round.

    run, without, memory: the run, the one without prefetch, and the one with everything in memory.
    In the result, `hidden` is (C + I - T) / I.
    """
    measured, read = run["measured"], without["measured"]["decode_bytes_read_per_token"]
    compute_s, token_s = (1 / record["measured"]["tokens_per_s"] for record in (memory, run))
    reads_s = read / storage_rate(without)
    return {
        "compute_ms": compute_s * 1e3,
        "storage_gb_per_s": storage_rate(without) / 1e9,
        "reads_ms": reads_s * 1e3,
        "over_longer": token_s / max(compute_s, reads_s),
        "storage_busy": measured["decode_shares"]["storage_busy"],
        "hidden": (compute_s + reads_s - token_s) / reads_s,
        "bytes_with_prefetch": measured["decode_bytes_read_per_token"] / read,
        "precision": measured["prefetch_precision"],
        "recall": measured["prefetch_recall"],
    }


def overlap_rows(results: Path) -> list[dict[str, Any]]:
    """Return median, least and most of every column, for each share and both types of keys and values."""
    rows = []
    for condition in SHARES:
        for arm in (OWN, OWN_HALF):
            parts = (runs(results, condition, arm), runs(results, condition, NO_ADVICE), runs(results, "memory32", arm))
            rounds = [overlap_of(*row) for row in zip(*parts, strict=False)]
            if rounds:
                values = {name: [row[name] for row in rounds] for name in COLUMNS}
                spread = {name: [statistics.median(found), min(found), max(found)] for name, found in values.items()}
                rows.append({"condition": condition, "arm": arm, **spread})
    return rows


def overlap_table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table."""
    head = (
        "C, ms",
        "I, ms",
        "T / max(C, I)",
        "storage busy",
        "hidden of I",
        "bytes / bytes without prefetch",
        "precision",
        "recall",
    )
    lines = [f"| condition | arm | {' | '.join(head)} |", "|" + "---|" * (len(head) + 2)]
    for row in rows:
        cells = ["{:.2f} ({:.2f} to {:.2f})".format(*row[name]) for name in COLUMNS]
        lines.append(f"| {row['condition']} | {row['arm']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description="Overlap of reads and computing.")
    parser.add_argument("results", type=Path)
    print(overlap_table(overlap_rows(parser.parse_args().results)))


if __name__ == "__main__":
    main()
