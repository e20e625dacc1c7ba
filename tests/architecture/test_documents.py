"""Documents point to files that exist, and every experiment has the fixed head and a row in the index."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "docs" / "experiments"
# Records of their date: they name files as they were.
RECORDS = ("bench/results/", "CHANGELOG.md")
FIELDS = ("Question", "Setup", "Command", "Result", "Verdict", "Superseded by")
# Stands for any name in an instruction: `compiler/families/NAME.py`.
PLACEHOLDER = "NAME"
VERDICT = re.compile(r"(kept|rejected|neutral)\b")

LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
CODE_SPAN = re.compile(r"`([^`]+)`")
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
# A path may be followed by the place in the file: `bench/kernels/speed.py:12`.
NAMED_PATH = re.compile(r"(?:\./)?((?:docs|bench)/[^\s:]*|(?:runtime|compiler)/[^\s:]*\.py)(?::\d+)?[.,;)]*")
MODULE = re.compile(r"bench(?:\.\w+)+")
HEAD_FIELD = re.compile(r"^- \*\*(.+?)\*\*:(.*?)(?=^- \*\*|^\S|\Z)", re.MULTILINE | re.DOTALL)
INDEX_ROW = re.compile(r"^\| \[[^\]]+\]\(([^()]+\.md)\) \| (.+?) \| (.+?) \| (\S+) \|$", re.MULTILINE)


def documents() -> list[Path]:
    """Return the tracked Markdown files of the present, without records."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    return [ROOT / name for name in listed if name and not name.startswith(RECORDS) and (ROOT / name).is_file()]


def experiments() -> list[Path]:
    return sorted(path for path in EXPERIMENTS.iterdir() if path.name != "README.md")


def anchors(text: str) -> set[str]:
    """Return the fragments of all headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def broken_links(document: Path) -> Iterator[str]:
    """Yield relative links whose file or heading does not exist."""
    text = FENCED.sub("", document.read_text(encoding="utf-8"))
    for link in LINK.findall(CODE_SPAN.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = document.parent / name if name else document
        if not target.exists() or (fragment and fragment not in anchors(target.read_text(encoding="utf-8"))):
            yield link


def named_paths(text: str) -> Iterator[str]:
    """Yield paths of this project in code spans and fenced blocks, also as arguments of a command.

    A module of the benchmarks (`python -m bench.search.formats`) counts as its path without a suffix.
    """
    spans = FENCED.findall(text) + CODE_SPAN.findall(FENCED.sub("", text))
    for word in " ".join(spans).split():
        if found := NAMED_PATH.fullmatch(word):
            yield found[1].rstrip(".,;)")
        elif MODULE.fullmatch(word):
            yield word.replace(".", "/")


def exists(path: str) -> bool:
    """Return whether a named path is a file or folder, with or without the suffix of Python."""
    pattern = path.rstrip("/").replace(PLACEHOLDER, "*")
    return any(ROOT.glob(pattern)) or any(ROOT.glob(f"{pattern}.py"))


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


def test_links_point_to_existing_files_and_headings() -> None:
    found = [f"{path.relative_to(ROOT)}: {link}" for path in documents() for link in broken_links(path)]
    assert found == []


def test_named_paths_exist() -> None:
    missing, seen = [], 0
    for document in documents():
        for path in named_paths(document.read_text(encoding="utf-8")):
            seen += 1
            if not exists(path):
                missing.append(f"{document.relative_to(ROOT)}: {path}")
    assert missing == [] and seen > 50


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
    ("link", "is_broken"),
    [
        ("[a](other.md)", False),
        ("[a](other.md#the-demo-make-demo)", False),
        ("[`a`](#here)", False),
        ("[a](https://example.org/none.md)", False),
        ("`[a](none.md)`", False),
        ("[a](none.md)", True),
        ("![a](none.png)", True),
        ("[a](other.md#none)", True),
    ],
)
def test_broken_links_are_found(tmp_path: Path, link: str, is_broken: bool) -> None:
    (tmp_path / "other.md").write_text("# The demo (`make demo`)\n")
    (tmp_path / "page.md").write_text(f"# Here\n\nSee {link}.\n")
    assert bool(list(broken_links(tmp_path / "page.md"))) == is_broken


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("see `docs/format.md`.", ["docs/format.md"]),
        ("run `python bench/kernels/speed.py --all`", ["bench/kernels/speed.py"]),
        ("`runtime/model/forward.py:12` and `runtime/model`", ["runtime/model/forward.py"]),
        ("```\npython -m bench.search.formats --sets x\n```", ["bench/search/formats"]),
        ("docs/format.md without a code span", []),
    ],
)
def test_named_paths_are_found(text: str, paths: list[str]) -> None:
    assert list(named_paths(text)) == paths


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
