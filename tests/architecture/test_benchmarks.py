"""The tables of speeds in README.md and docs/benchmarks.md show the numbers of bench/results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HEADER = "| situation | engine | decode, tokens/s (least to most) | prompt, tokens/s | read, MiB per token |"
CONDITIONS = {
    "all in memory, 128 + 256": "memory",
    "all in memory, 32 + 64": "memory32",
    "all in memory, 512 + 8": "prefill512",
    "all in memory, 900 + 64": "memory900",
    "75 % of the experts, 32 + 64": "cache-75",
    "50 % of the experts, 32 + 64": "cache-50",
    "25 % of the experts, 32 + 64": "cache-25",
    "25 % of the experts, 512 + 4": "prefill512-25",
    "8 % of the experts, 32 + 16": "cache-8",
    "25 %, storage of 500 MB/s, 8 + 16": "disk500-25",
    "25 %, storage of 90 MB/s, 8 + 16": "disk90-25",
}
ARMS = {
    "moec": ("moec",),
    "moec `--kv float16`": ("moec --kv float16",),
    "moec `--prefetch off`": ("moec --prefetch off",),
    "moec `--cache-state cold`": ("moec, cold start",),
    "llama.cpp": ("llama.cpp repacked", "llama.cpp mmap 128 KiB"),
    "llama.cpp, second run": ("llama.cpp mmap 128 KiB, warm",),
    "llama.cpp, as found": ("llama.cpp mmap as found",),
    "ik_llama.cpp": ("ik_llama.cpp repacked", "ik_llama.cpp mmap 128 KiB"),
}


@dataclass(frozen=True)
class Row:
    """A row of a table of speeds.

    folder: folder of the results, named last before the table.
    speeds: median, or median, least and most, as printed.
    """

    folder: str
    situation: str
    engine: str
    speeds: list[str]
    prompt: str
    read: str


def rows(page: str) -> Iterator[Row]:
    """Yield the rows of all tables of speeds of a page."""
    folder, is_inside = "", False
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        for name in re.findall(r"`bench/results/([\w-]+)`", line):
            folder = name
        is_inside = line == HEADER or (is_inside and line.startswith("|"))
        if is_inside and line != HEADER and not line.startswith("|---"):
            situation, engine, decode, prompt, read = (cell.strip() for cell in line.strip("|").split("|"))
            yield Row(folder, situation, engine, re.findall(r"[\d.]+", decode), prompt, read)


def source(row: Row) -> dict[str, Any]:
    """Return the measurement that a row shows."""
    summary = json.loads((ROOT / "bench" / "results" / row.folder / "summary.json").read_text(encoding="utf-8"))
    arms = ARMS[row.engine]
    (found,) = [
        entry
        for entry in summary["rows"]
        if entry["condition"] == CONDITIONS[row.situation] and entry["arm"] in arms and entry["decode_tokens_per_s"] > 0
    ]
    return dict(found)


def shows(printed: str, value: float) -> bool:
    """Return whether a printed number is the value, rounded to the digits that are printed."""
    digits = len(printed.partition(".")[2])
    return abs(float(printed) - value) <= 0.5001 * 10**-digits


@pytest.mark.parametrize(("page", "least_rows"), [("README.md", 15), ("docs/benchmarks.md", 150)])
def test_speeds_are_those_of_the_results(page: str, least_rows: int) -> None:
    wrong, seen = [], 0
    for row in rows(page):
        seen += 1
        found = source(row)
        values = [found["decode_tokens_per_s"]]
        if len(row.speeds) > 1:
            values += [found["decode_least"], found["decode_most"]]
        printed = [*row.speeds, row.prompt, row.read]
        values += [found["prefill_tokens_per_s"], found["read_mib_per_token"]]
        if not all(shows(text, value) for text, value in zip(printed, values, strict=True)):
            wrong.append(f"{row} should show {values}")
    assert wrong == [] and seen >= least_rows


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_every_named_folder_of_results_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:bench/results/)?(20\d\d-\d\d-\d\d-[\w-]+)`", text))
    existing = {path.name for path in (ROOT / "bench" / "results").iterdir()}
    assert named and named <= existing


def test_every_folder_of_results_is_named() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    folders = [path.name for path in (ROOT / "bench" / "results").iterdir() if path.is_dir()]
    assert len(folders) > 30 and [name for name in sorted(folders) if name not in text] == []


def test_output_in_the_readme_was_printed() -> None:
    """README.md shows lines of one run of `moec compile`, and nothing else between them."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What a compile prints")[2]
    shown = [line for line in section.split("```")[1].strip().splitlines() if line != "..."]
    results = ROOT / "bench" / "results" / "2026-11-27-one-range-for-wanted-kls"
    printed = (results / "compile.txt").read_text(encoding="utf-8").splitlines()
    assert len(shown) > 8 and [line for line in shown if line.rstrip() not in map(str.rstrip, printed)] == []
