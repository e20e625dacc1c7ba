"""Speeds in README.md and docs/benchmarks.md are the numbers of bench/results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.recorded import recorded

ROOT = Path(__file__).parents[2]
HEADER = "| situation | engine | decode, tokens/s (least to most) | prompt, tokens/s | read, MiB per token |"
CONDITIONS = {
    "all in memory, 128 + 256": "memory",
    "all in memory, 32 + 64": "memory32",
    "all in memory, 512 + 8": "prefill512",
    "75 % of the experts, 32 + 64": "cache-75",
    "50 % of the experts, 32 + 64": "cache-50",
    "25 % of the experts, 32 + 64": "cache-25",
    "25 % of the experts, 512 + 4": "prefill512-25",
}
RATIOS = [name for name in CONDITIONS if name != "all in memory, 32 + 64"]
ARMS = {
    "moec": ("moec",),
    "moec `--kv float16`": ("moec --kv float16",),
    "moec `--set prefetch=off`": ("moec --prefetch off",),
    "llama.cpp": ("llama.cpp repacked", "llama.cpp mmap 128 KiB"),
    "ik_llama.cpp": ("ik_llama.cpp repacked", "ik_llama.cpp mmap 128 KiB"),
}


@dataclass(frozen=True)
class Row:
    """A row of a table of speeds.

    run: path of the results, named last before the table.
    speeds: median, or median, least and most, as printed.
    """

    run: str
    situation: str
    engine: str
    speeds: list[str]
    prompt: str
    read: str


def cells(page: str, header: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of all tables of a page that have this header, each with the results named last before it."""
    run, is_inside = "", False
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        for path in re.findall(r"`(bench/results/[\w-]+\.jsonl)`", line):
            run = path
        is_inside = line == header or (is_inside and line.startswith("|"))
        if is_inside and line != header and not line.startswith("|---"):
            yield run, [cell.strip() for cell in line.strip("|").split("|")]


def rows(page: str) -> Iterator[Row]:
    """Yield the rows of all tables of speeds of a page."""
    for run, (situation, engine, decode, prompt, read) in cells(page, HEADER):
        yield Row(run, situation, engine, re.findall(r"[\d.]+", decode), prompt, read)


def source(run: str, situation: str, engine: str) -> dict[str, Any]:
    """Return the measurement of an engine in a situation."""
    (row,) = [
        row
        for row in recorded(run, "summary.json")
        if row["condition"] == CONDITIONS[situation] and row["arm"] in ARMS[engine] and row["decode_tokens_per_s"] > 0
    ]
    return row


def shows(printed: str, value: float) -> bool:
    """Return whether a printed number is the value, rounded to the digits that are printed."""
    digits = len(printed.partition(".")[2])
    return abs(float(printed) - value) <= 0.5001 * 10**-digits


def test_speeds_are_those_of_the_results() -> None:
    wrong, seen = [], 0
    for row in rows("docs/benchmarks.md"):
        seen += 1
        measured = source(row.run, row.situation, row.engine)
        values = [measured["decode_tokens_per_s"]]
        if len(row.speeds) > 1:
            values += [measured["decode_least"], measured["decode_most"]]
        printed = [*row.speeds, row.prompt, row.read]
        values += [measured["prefill_tokens_per_s"], measured["read_mib_per_token"]]
        if not all(shows(text, value) for text, value in zip(printed, values, strict=True)):
            wrong.append(f"{row} should show {values}")
    assert wrong == [] and seen >= 25


def test_ratios_in_the_readme_are_those_of_the_results() -> None:
    """The sentence below the picture of decode speeds has the ratios with 25 % of the experts."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    run, situation = "bench/results/2026-11-24-fork.jsonl", "25 % of the experts, 32 + 64"
    for engine in ("llama.cpp", "ik_llama.cpp"):
        (printed,) = re.findall(rf"([\d.]+) times as fast as {re.escape(engine)}", text)
        moec, peer = (source(run, situation, name)["decode_tokens_per_s"] for name in ("moec", engine))
        assert shows(printed, moec / peer)


def test_ratios_of_speeds_are_those_of_the_results() -> None:
    """A cell has the ratio of decode speeds, then that of prompts."""
    seen = 0
    for run, (_, _, *printed) in cells("docs/benchmarks.md", f"| processor | results | {' | '.join(RATIOS)} |"):
        for situation, cell in zip(RATIOS, printed, strict=True):
            seen += 1
            moec, peer = (source(run, situation, engine) for engine in ("moec", "llama.cpp"))
            values = [moec[name] / peer[name] for name in ("decode_tokens_per_s", "prefill_tokens_per_s")]
            assert all(map(shows, cell.split(", "), values)), (run, situation, values)
    assert seen == 18


def test_every_named_file_of_results_exists() -> None:
    named = re.findall(r"`(bench/results/[^`]+)`", (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"))
    assert named and [path for path in named if not (ROOT / path).is_file()] == []


def test_every_file_of_results_is_named() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    files = [path.name for path in (ROOT / "bench" / "results").iterdir()]
    assert len(files) > 10 and [name for name in sorted(files) if name not in text] == []
