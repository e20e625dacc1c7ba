"""The guide to a fleet is one run: its commands succeed in their order, and print what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "from-checkpoint-to-fleet.md"
BLOCK = re.compile(r"^```\n(\$ .*?)^```", re.MULTILINE | re.DOTALL)
VARYING = (
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{16,64}\b"), "DIGEST"),
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"), "TIME"),
    (re.compile(r"^\[\d+:\d\d\]"), "[SECONDS]"),
    (re.compile(r"with the kernels \w+"), "with the kernels NAME"),
)


def runs(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of a page, each with the lines that are shown. Blocks with an error are tested elsewhere."""
    for block in BLOCK.findall(text):
        if re.search(r"^error: ", block, re.MULTILINE):
            continue
        for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, *shown = part.rstrip("\n").split("\n")
            yield command, shown


def steady(line: str) -> str:
    """Return a line without what differs from run to run."""
    for pattern, name in VARYING:
        line = pattern.sub(name, line)
    return " ".join(line.split())


def missing_line(shown: Sequence[str], printed: Sequence[str]) -> str | None:
    """Return the first shown line that is not printed after the one before it; None if all are.

    A line `...` stands for any lines, a line that ends with `...` for one that begins so.
    """
    left, may_skip = list(map(steady, printed)), False
    for line in map(steady, shown):
        if line == "...":
            may_skip = True
            continue
        at = next((n for n, found in enumerate(left) if _is_shown(line, found)), None)
        if at is None or (at > 0 and not may_skip):
            return line
        left, may_skip = left[at + 1 :], False
    return None if may_skip or not left else f"nothing more, found {left[0]}"


def _is_shown(line: str, printed: str) -> bool:
    return printed.startswith(line.removesuffix("...").rstrip()) if line.endswith("...") else line == printed


@pytest.mark.slow
def test_the_commands_of_the_guide_print_what_it_shows(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    own = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    count = 0
    for command, shown in runs(GUIDE.read_text(encoding="utf-8")):
        run = subprocess.run(
            ["bash", "-c", f"exec 2>&1; {command}"], cwd=tmp_path, env=own, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, f"{command}\n{run.stdout}"
        missing = missing_line(shown, run.stdout.splitlines())
        assert missing is None, f"$ {command}\nexpected: {missing}\n{run.stdout}"
        count += 1
    assert count >= 14


@pytest.mark.parametrize(
    ("shown", "printed", "missing"),
    [
        (["a", "b"], ["a", "b"], None),
        (["a", "..."], ["a", "b", "c"], None),
        (["...", "c"], ["a", "b", "c"], None),
        (["a b..."], ["a bc"], None),
        (["at 2026-11-26T13:04:44Z of 02f5d6274dd25afb"], ["at 2027-01-01T00:00:00Z of 45844c7c5e24b330"], None),
        (["a", "c"], ["a", "b", "c"], "c"),
        (["...", "d"], ["a", "b"], "d"),
        (["a"], ["a", "b"], "nothing more, found b"),
        (["7.2 MiB to fetch"], ["7.3 MiB to fetch"], "7.2 MiB to fetch"),
    ],
)
def test_lines_are_compared_in_their_order(shown: list[str], printed: list[str], missing: str | None) -> None:
    assert missing_line(shown, printed) == missing
