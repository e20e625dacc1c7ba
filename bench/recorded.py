"""Recorded results: one JSON Lines file per run in `bench/results`.

The first line has `machine`, `command` and `commit`. Each further line is one measurement, and names its `file`: the
output of the command that it comes from. Runs of November 2026 have six digits, and no rows and fields that nothing
reads. `git show e485c026:bench/results/FILE` has them whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def recorded(source: str, file: str) -> list[dict[str, Any]]:
    """Return the measurements of one file of a run.

    source: path of the run's results, from the root of the repository.
    """
    lines = (ROOT / source).read_text(encoding="utf-8").splitlines()[1:]
    return [row for row in map(json.loads, lines) if row["file"] == file]
