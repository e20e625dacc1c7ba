"""The table of seconds in docs/ci.md, from reports of gates: python -m tests.gate_seconds [FILE...]

Of several reports, which come from runs one after the other, numbers add up.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

REPORT = Path(__file__).parents[1] / "build" / "gates.json"
STATES = ("passed", "failed", "skipped")


def table(reports: list[dict[str, dict[str, float]]]) -> str:
    """Markdown: a row per gate, by number, and one of all."""
    sums: dict[str, Counter[str]] = {}
    for report in reports:
        for gate, counts in report.items():
            row = sums.setdefault(gate, Counter())
            row.update({name: counts.get(name, 0) for name in (*STATES, "seconds")})
    lines = ["| gate | tests | seconds |", "|---|---|---|"]
    total: Counter[str] = Counter()
    for gate in sorted(sums, key=lambda name: int(name[1:])):
        total += sums[gate]
        lines.append(_row(gate, sums[gate]))
    return "\n".join([*lines, _row("all", total)])


def _row(name: str, counts: Counter[str]) -> str:
    failed = f", {counts['failed']:.0f} failed" if counts["failed"] else ""
    return f"| {name} | {counts['passed']:.0f}{failed} | {counts['seconds']:.0f} |"


def main(paths: list[Path]) -> None:
    """Print the table."""
    print(table([json.loads(path.read_text()) for path in paths]))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or [REPORT])
