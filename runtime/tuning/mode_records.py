"""What lossy modes were measured to cost: `modes` of quality.json, and `NAME.modes.json` beside a bundle.

A record holds the task, the conditions, and a row per setting; rows of the second kind count where both have one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moec.manifests.bundle import QUALITY_NAME
from moec.manifests.errors import OptionError
from moec.manifests.files.input_file import UnreadableFile, read_input
from moec.manifests.files.limits import MAX_QUALITY_BYTES, QUALITY_JSON
from moec.manifests.files.output_file import write_output
from moec.manifests.files.strict_json import load_strict_json

from ..options.lossy import LossyModes, parse_modes
from .tune_file import bundle_sha256, file_next_to

SUFFIX = ".modes.json"
FORMAT_VERSION = 1
OPTION_NAMES = ("dynamic_precision", "big_little", "cache_routing")


def record_path(bundle: Path) -> Path:
    """Where the record beside a bundle is."""
    return file_next_to(bundle, SUFFIX)


def write_record(bundle: Path, record: dict[str, Any]) -> Path:
    """Write the record beside a bundle, whole or not at all. Raises as `output_file`.

    What was measured of the same bundle before, of other settings, stays, each row with its conditions.
    """
    path = record_path(bundle)
    measured = {row["mode"] for row in record["rows"]}
    rows = [*record["rows"], *(row for row in _rows(_beside(bundle)) if row["mode"] not in measured)]
    plain = {"format_version": FORMAT_VERSION, "bundle": bundle_sha256(bundle), **record, "rows": rows}
    write_output(path, (json.dumps(plain, indent=1) + "\n").encode())
    return path


def measured_rows(bundle: Path) -> list[dict[str, Any]]:
    """Rows of all settings that were measured on this bundle, each with `options`, `loss` and its conditions.

    A record that cannot be read, or is of another bundle, has none.
    """
    found: dict[str, dict[str, Any]] = {}
    for record in (_load(bundle / QUALITY_NAME).get("modes"), _beside(bundle)):
        for row in _rows(record):
            found[row["mode"]] = row
    return list(found.values())


def _beside(bundle: Path) -> dict[str, Any]:
    """The record beside a bundle; empty if it is of another one."""
    found = _load(record_path(bundle))
    is_its = found.get("bundle") == bundle_sha256(bundle) and found.get("format_version") == FORMAT_VERSION
    return found if is_its else {}


def calibrated_lower_half(bundle: Path) -> float | None:
    """Share of a token's weight that the lower-ranked half of its experts had in calibration, the mean over layers.

    None where nothing was calibrated, or what `quality.json` says cannot be read.
    """
    # Zero: a layer that does not route, or has one expert a token.
    routed = [share for share in _calibrated(bundle, "lower_half_share") if share > 0]
    return sum(routed) / len(routed) if routed else None


def calibrated_deciles(bundle: Path) -> list[float]:
    """The nine deciles of experts' unimportance in calibration, as HOBBIT's thresholds mean it; empty where unknown."""
    found = _calibrated(bundle, "unimportance_deciles")
    return found if len(found) == 9 and all(0 <= share <= 1 for share in found) and found == sorted(found) else []


def _calibrated(bundle: Path, name: str) -> list[float]:
    """Numbers of `quality.json` by their name; empty where it has none."""
    statistics = _load(bundle / QUALITY_NAME).get("statistics")
    found = statistics.get(name) if isinstance(statistics, dict) else None
    is_numbers = isinstance(found, list) and all(isinstance(share, int | float) for share in found)
    return [float(share) for share in found] if is_numbers and found is not None else []


def modes_of_row(row: dict[str, Any]) -> LossyModes:
    """The modes of a row. Raises OptionError."""
    return parse_modes(*(row["options"].get(name) for name in OPTION_NAMES))


def choose_thresholds(rows: list[dict[str, Any]], loss: float, low_bytes_share: float) -> str | None:
    """The `T1,T2` of dynamic precision, alone, that leave most bytes unread at a loss of at most `loss`, in the upper
    bound of its interval; None if none was measured to.

    low_bytes_share: what a low version takes of a high one.
    """
    option = "dynamic_precision"
    fitting = [row for row in rows if set(row["options"]) == {option} and row["loss"]["upper95"] <= loss]

    def saved(row: dict[str, Any]) -> float:
        shares = row["decisions"]
        return float(shares["skipped_share"] + shares["low_share"] * (1 - low_bytes_share))

    best = max(fitting, key=saved, default=None)
    return None if best is None else str(best["options"][option])


def _load(path: Path) -> dict[str, Any]:
    try:
        plain = load_strict_json(read_input(path, MAX_QUALITY_BYTES, follow_links=True), QUALITY_JSON)
    except (UnreadableFile, ValueError):
        return {}
    return plain if isinstance(plain, dict) else {}


def _rows(record: Any) -> list[dict[str, Any]]:
    """The rows that say what a run would ask of them."""
    rows = record.get("rows") if isinstance(record, dict) else None
    conditions = {name: record.get(name) for name in ("task", "n", "expert_cache", "cache_state")} if rows else {}
    return [{**conditions, **row} for row in rows if _is_row(row)] if isinstance(rows, list) else []


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("mode"), str) or not isinstance(row.get("loss"), dict):
        return False
    options, decided = row.get("options"), row.get("decisions")
    if not isinstance(options, dict) or not isinstance(decided, dict):
        return False
    numbers = (row["loss"].get("loss"), row["loss"].get("upper95"))
    shares = (decided.get("skipped_share"), decided.get("low_share"))
    if not all(isinstance(number, int | float) for number in (*numbers, *shares)):
        return False
    try:
        return set(options) <= set(OPTION_NAMES) and modes_of_row(row).to_text() == row["mode"]
    except (OptionError, AttributeError, TypeError):
        return False
