"""Records of experiments: their head, their file names, and the index."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from tests.architecture.test_documents import EXPERIMENTS

FIELDS = ("Question", "Setup", "Command", "Result", "Verdict", "Superseded by")
VERDICT = re.compile(r"(kept|rejected|neutral)\b")
HEAD_FIELD = re.compile(r"^- \*\*(.+?)\*\*:(.*?)(?=^- \*\*|^\S|\Z)", re.MULTILINE | re.DOTALL)
INDEX_ROW = re.compile(r"^\| \[[^\]]+\]\(([^()]+\.md)\) \| (.+?) \| (.+?) \| (\S+) \|$", re.MULTILINE)


def experiments() -> list[Path]:
    return sorted(path for path in EXPERIMENTS.iterdir() if path.name != "README.md")


def head_of(text: str) -> dict[str, str]:
    """Return the fields before the first paragraph of the text, in their order."""
    return {name: " ".join(value.split()) for name, value in HEAD_FIELD.findall(text)}


def head_errors(text: str) -> Iterator[str]:
    """Yield the faults of the head of one experiment."""
    title, _, rest = text.partition("\n\n")
    if not re.fullmatch(r"# .+", title):
        yield "the first line is not a title"
    if not rest.startswith("- **Question**:"):
        yield "the head does not follow the title"
    head = head_of(rest)
    if tuple(head) != FIELDS:
        yield f"fields {list(head)}, expected {list(FIELDS)}"
    yield from (f"{name} is empty" for name, value in head.items() if not value)
    if not VERDICT.match(head.get("Verdict", "")):
        yield "the verdict does not begin with kept, rejected or neutral"


def is_dated(name: str) -> bool:
    """Return whether a file name begins with an ISO date and ends with a subject."""
    found = re.fullmatch(r"(\d{4}-\d{2}-\d{2})-[a-z0-9][a-z0-9.-]*\.md", name)
    if found is None:
        return False
    try:
        date.fromisoformat(found[1])
    except ValueError:
        return False
    return True


def index_rows() -> list[tuple[str, str, str, str]]:
    """Return file, question, verdict and date of every row of the index."""
    return INDEX_ROW.findall((EXPERIMENTS / "README.md").read_text(encoding="utf-8"))


def test_experiments_have_the_fixed_head() -> None:
    found = [
        f"{path.name}: {error}" for path in experiments() for error in head_errors(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_file_names_of_experiments_begin_with_a_date() -> None:
    assert [path.name for path in experiments() if not is_dated(path.name)] == []


def test_index_lists_each_experiment_once() -> None:
    assert Counter(row[0] for row in index_rows()) == Counter(path.name for path in experiments())


def test_index_repeats_question_verdict_and_date() -> None:
    found = []
    for name, question, verdict, day in index_rows():
        head = head_of((EXPERIMENTS / name).read_text(encoding="utf-8"))
        first, own = VERDICT.match(verdict), VERDICT.match(head["Verdict"])
        is_superseded = not head["Superseded by"].startswith("none")
        if (
            question != head["Question"]
            or not name.startswith(day)
            or first is None
            or own is None
            or first[1] != own[1]
            or is_superseded != ("Superseded by" in verdict)
        ):
            found.append(name)
    assert found == []


@pytest.mark.parametrize(
    ("name", "is_valid"),
    [
        ("2026-11-21-byte-scales.md", True),
        ("2026-13-21-byte-scales.md", False),
        ("byte-scales.md", False),
        ("2026-11-21.md", False),
    ],
)
def test_dates_are_checked(name: str, is_valid: bool) -> None:
    assert is_dated(name) == is_valid


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("- **Setup**: x\n", "", "fields"),
        ("kept: y", "works", "verdict"),
        ("- **Result**: 1\n", "- **Result**:\n", "Result is empty"),
        ("# A", "A", "title"),
    ],
)
def test_faults_of_a_head_are_found(old: str, new: str, error: str) -> None:
    text = (
        "# A\n\n- **Question**: q?\n- **Setup**: x\n- **Command**: c\n- **Result**: 1\n"
        "- **Verdict**: kept: y\n- **Superseded by**: none\n"
    )
    assert list(head_errors(text)) == []
    assert any(error in found for found in head_errors(text.replace(old, new)))
