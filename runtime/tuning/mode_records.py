"""Measured losses of lossy modes: `modes` in quality.json, and `NAME.modes.json` next to a bundle.

A record has the task, the conditions, and a row for each setting. A row of `NAME.modes.json` replaces the row of
quality.json with the same setting.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from moec.manifests.bundle import QUALITY_NAME, BundleManifest
from moec.manifests.errors import OptionError
from moec.manifests.files.implied_names import check_implied, write_implied
from moec.manifests.files.input_file import UnreadableFile, read_input
from moec.manifests.files.limits import MAX_QUALITY_BYTES, QUALITY_JSON
from moec.manifests.files.strict_json import load_strict_json
from moec.manifests.hobbit_thresholds import best_thresholds

from ..bundle.open_bundle import open_bundle
from ..options.lossy import AUTO, MODE_OPTIONS, PUBLISHED, LossyModes, parse_dynamic_precision, parse_modes
from .tune_file import bundle_sha256, file_next_to

SUFFIX = ".modes.json"
FORMAT_VERSION = 1
_SHARE = re.compile(r"([0-9]{1,2}(?:\.[0-9]{1,6})?)%")
_MARK = re.compile(rb'\A\{\s*"format_version": [0-9]+,\s*"bundle": "')


def record_path(bundle: Path) -> Path:
    """Return the path of the record next to a bundle."""
    return file_next_to(bundle, SUFFIX)


def write_record(bundle: Path, record: dict[str, Any]) -> Path:
    """Write the record next to a bundle atomically. Raises the errors of `write_implied`.

    Earlier rows of the same bundle with other settings are kept, each with its conditions.
    """
    path = record_path(bundle)
    measured = {row["mode"] for row in record["rows"]}
    rows = [*record["rows"], *(row for row in _rows(_record_next_to(bundle)) if row["mode"] not in measured)]
    plain = {"format_version": FORMAT_VERSION, "bundle": bundle_sha256(bundle), **record, "rows": rows}
    write_implied(path, (json.dumps(plain, indent=1) + "\n").encode(), _MARK)
    return path


def check_record(bundle: Path) -> None:
    """Check before the measurement that the record can be written. Raises the errors of `check_implied`."""
    check_implied(record_path(bundle), _MARK)


def measured_rows(bundle: Path) -> list[dict[str, Any]]:
    """Return the rows of all settings measured on this bundle, each with `options`, `loss` and its conditions.

    A record that cannot be read, or belongs to another bundle, has no rows.
    """
    rows: dict[str, dict[str, Any]] = {}
    for record in (load_record(bundle / QUALITY_NAME).get("modes"), _record_next_to(bundle)):
        for row in _rows(record):
            rows[row["mode"]] = row
    return list(rows.values())


def _record_next_to(bundle: Path) -> dict[str, Any]:
    """Return the record next to a bundle; empty if it belongs to another bundle."""
    record = load_record(record_path(bundle))
    is_of_bundle = record.get("bundle") == bundle_sha256(bundle) and record.get("format_version") == FORMAT_VERSION
    return record if is_of_bundle else {}


def calibrated_lower_half(bundle: Path) -> float | None:
    """Return the weight share of the lower-ranked half of a token's experts in calibration, mean over layers.

    None if there was no calibration, or `quality.json` cannot be read.
    """
    # A share of 0 means that the layer does not route, or has one expert per token.
    routed = [share for share in _calibrated(bundle, "lower_half_share") if share > 0]
    return sum(routed) / len(routed) if routed else None


def calibrated_deciles(bundle: Path) -> list[float]:
    """Return the nine deciles of the experts' unimportance in calibration, as HOBBIT's thresholds define it.

    Empty if they are unknown.
    """
    deciles = _calibrated(bundle, "unimportance_deciles")
    return (
        deciles
        if len(deciles) == 9 and all(0 <= share <= 1 for share in deciles) and deciles == sorted(deciles)
        else []
    )


def _calibrated(bundle: Path, name: str) -> list[float]:
    """Return a list of numbers from the statistics of `quality.json`; empty if it is missing."""
    statistics = load_record(bundle / QUALITY_NAME).get("statistics")
    numbers = statistics.get(name) if isinstance(statistics, dict) else None
    is_numbers = isinstance(numbers, list) and all(isinstance(share, int | float) for share in numbers)
    return [float(share) for share in numbers] if is_numbers and numbers is not None else []


def modes_of_row(row: dict[str, Any]) -> LossyModes:
    """Return the modes of a row. Raises OptionError."""
    return parse_modes(*(row["options"].get(name) for name in MODE_OPTIONS))


def recorded_setting(bundle: Path, text: str) -> str:
    """Return the setting of `auto`, `auto SHARE` or `published` from the records of a bundle; other texts unchanged.

    `auto` allows the loss target of the bundle.
    Raises OptionError if no thresholds are recorded that fit, and the errors of `open_bundle`.
    """
    word, _, share = text.strip().partition(" ")
    if word in (AUTO, PUBLISHED) and "+" in share:
        raise OptionError(
            f"`--lossy '{text[:60]}'`: the thresholds of `{word}` were measured without other modes",
            "write the thresholds, like `--lossy 'dynamic-precision 0.6,0.9 + big-little gamma=0.7'`",
        )
    if word == PUBLISHED and not share:
        return f"dynamic-precision {_published_thresholds(bundle)}"
    if word != AUTO:
        return text
    allowed, rows = _allowed_loss(bundle, share.strip()), measured_rows(bundle)
    with open_bundle(bundle) as opened:
        best = best_thresholds(rows, allowed, low_bytes_share(opened.manifest))
    if best is not None:
        return str(best["mode"])
    message = f"no thresholds were measured to cost at most {allowed:.2%} of the score of `{bundle}`"
    dynamic = [row["loss"] for row in rows if set(row["options"]) == {"dynamic_precision"}]
    if not dynamic:
        raise OptionError(message, "measure them: moec eval BUNDLE --data DATA --modes sweep")
    least = min(row["upper95"] for row in dynamic)
    message += f": the least 95 % bound of them is {least:.2%}"
    smallest = max(_smallest_bound(row) for row in dynamic)
    if smallest > allowed:
        message += f", and their items can show no bound below {smallest:.2%}"
        raise OptionError(message, "measure on more items: moec eval BUNDLE --data DATA --modes sweep")
    raise OptionError(message, f"allow more: --lossy 'auto {math.ceil(10_000 * least) / 100:g}%'")


def _allowed_loss(bundle: Path, share: str) -> float:
    """Return the share after `auto`, or the loss target of the bundle. Raises OptionError."""
    if share:
        match = _SHARE.fullmatch(share)
        if match is None:
            raise OptionError(f"`--lossy auto {share[:20]}` is not a share", "write it like `auto 1%`")
        return float(match[1]) / 100
    target = load_record(bundle / QUALITY_NAME).get("target")
    value = target.get("value") if isinstance(target, dict) and target.get("kind") == "loss" else None
    if not isinstance(value, int | float):
        raise OptionError(f"`{bundle}` has no loss target that `--lossy auto` could keep", "write one: `auto 1%`")
    return float(value)


def _smallest_bound(loss: dict[str, Any]) -> float:
    """Return the 95 % bound of a loss on its items if no answer differed; 0 without a limit for one item.

    Bounds are of resampled items and a further one that loses the most. It is drawn at most three times in 95 % of
    the samples: the quantile of a Poisson distribution of mean 1.
    """
    largest, count = loss.get("largest_item_loss"), loss.get("n")
    if not isinstance(largest, int | float) or not isinstance(count, int):
        return 0.0
    return 3 * largest / (count + 1)


def _published_thresholds(bundle: Path) -> str:
    """Return the `T1,T2` at which calibration has HOBBIT's shares of versions. Raises OptionError without them."""
    record = load_record(bundle / QUALITY_NAME).get("modes")
    text = record.get("published") if isinstance(record, dict) else None
    try:
        if isinstance(text, str):
            return parse_dynamic_precision(text).to_text()
    except OptionError:
        pass
    raise OptionError(
        f"`{bundle}` does not record the thresholds that HOBBIT's shares have on its calibration",
        "compile it with `--as hobbit` and `--data`, or write them: `--lossy 'dynamic-precision T1,T2'`",
    )


def low_bytes_share(manifest: BundleManifest) -> float:
    """Return the size of the low versions, as a share of that of all experts."""
    low = sum(entry.size_bytes for entry in manifest.low_experts)
    return low / max(manifest.cost.expert_padded_bytes, 1)


def load_record(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of measurements; empty if there is none that can be read."""
    try:
        plain = load_strict_json(read_input(path, MAX_QUALITY_BYTES, follow_links=True), QUALITY_JSON)
    except (UnreadableFile, ValueError):
        return {}
    return plain if isinstance(plain, dict) else {}


def _rows(record: Any) -> list[dict[str, Any]]:
    """Return the valid rows of a record, each with the conditions of the record."""
    rows = record.get("rows") if isinstance(record, dict) else None
    conditions = {name: record.get(name) for name in ("task", "n", "expert_cache", "cache_state")} if rows else {}
    return [{**conditions, **row} for row in rows if _is_row(row)] if isinstance(rows, list) else []


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("mode"), str) or not isinstance(row.get("loss"), dict):
        return False
    options, numbers = row.get("options"), (row["loss"].get("loss"), row["loss"].get("upper95"))
    if not isinstance(options, dict) or not all(isinstance(number, int | float) for number in numbers):
        return False
    interval = row["loss"].get("interval95")
    if not isinstance(interval, list) or len(interval) != 2:
        return False
    if not all(end is None or isinstance(end, int | float) for end in interval):
        return False
    try:
        modes = modes_of_row(row)
        return set(options) <= set(MODE_OPTIONS) and modes.to_text() == row["mode"] and _has_decisions(row, modes)
    except (OptionError, AttributeError, TypeError):
        return False


def _has_decisions(row: dict[str, Any], modes: LossyModes) -> bool:
    """Return whether a row has the decisions of its modes. None: they decide nothing. An exact row has no modes."""
    decided = row.get("decisions")
    if decided is None:
        return not modes.decides and not modes.is_exact
    shares = (decided.get("skipped_share"), decided.get("low_share"))
    return all(isinstance(share, int | float) for share in shares)
