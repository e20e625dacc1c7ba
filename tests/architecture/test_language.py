"""Documents, docstrings and help texts are plain English: short sentences, no dialect, no relative clause first."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from moec.cli.main import cli

ROOT = Path(__file__).parents[2]
CODE_FOLDERS = (
    "manifests",
    "profiles",
    "evaluation",
    "runtime",
    "shipping",
    "serving",
    "reporting",
    "compiler",
    "cli",
    "bench",
    "examples",
)
# Records of their date.
RECORDS = ("bench/results/",)

MAX_WORDS = 30
# Word or phrase -> what to write. Many readers know these words only in another meaning, or not at all.
DIALECT = {
    "at hand": "available",
    "behind": "after",
    "beside": "next to",
    "besides": "in addition to",
    "comes to": "is",
    "hungry": "needs much",
    "in front of": "before",
    "in passing": "for a short time",
    "in the place of": "instead of",
    "nobody": "none",
    "of those that": "of the ... that",
    "side by side": "at once",
    "starve": "get no share of",
    "whoever": "the ... that",
}
# Terms of the field that hold one of these words.
ALLOWED = ("comes to mind",)
OPENERS = re.compile(r"(?:What|Of|Those|Whether|The same|As|Where|That|How)\b")

FENCE = re.compile(r"^ *(?:```|~~~)")
LIST_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")
# A line that describes a field or parameter: `name: text`, `one, other: text`, `name[0]: text`.
FIELD = re.compile(r"^\s*`?[\w.\[\]*/+-]+`?(?:, `?[\w.\[\]*/+-]+`?)*:\s")
SENTENCE_END = re.compile(r"(?<=[.!?:;])[)\"*]*\s+(?=[\"(*]*[A-Z`\[])|(?<=[.!?])\*\*\s+")
CODE_SPAN = re.compile(r"``?[^`]+``?")
LINK = re.compile(r"\[([^\]]*)\]\([^()\s]+\)")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text. Tables, fenced blocks and blocks of examples are left out."""
    for block in blocks(text):
        parts = SENTENCE_END.split(CODE_SPAN.sub("CODE", block))
        yield from (LINK.sub(r"\1", part).strip() for part in parts)


def blocks(text: str) -> Iterator[str]:
    """Yield paragraphs, list items and lines that describe one field."""
    block: list[str] = []
    is_code = False
    for line in [*text.splitlines(), ""]:
        is_fence = FENCE.match(line) is not None
        if is_fence:
            is_code = not is_code
        is_left_out = is_code or is_fence or not line.strip() or line.lstrip().startswith(("|", "#"))
        starts_anew = is_left_out or LIST_ITEM.match(line) or FIELD.match(line)
        if starts_anew and block:
            if block[0] != "\b":  # click prints such a block as it is
                yield " ".join(" ".join(block).split())
            block = []
        if not is_left_out:
            block.append(LIST_ITEM.sub("", line, count=1) if line.strip() != "\b" else "\b")


def faults(text: str) -> Iterator[str]:
    """Yield what makes a text hard to read."""
    for sentence in sentences(text):
        count = len(sentence.split())
        if count > MAX_WORDS:
            yield f"a sentence of {count} words: {sentence[:70]}"
        kept = sentence.lower()
        for term in ALLOWED:
            kept = kept.replace(term, "")
        for word, better in DIALECT.items():
            if re.search(rf"\b{word}\b", kept):
                yield f"`{word}`, write `{better}`: {sentence[:70]}"


@cache
def tracked(pattern: str) -> list[Path]:
    """Return the tracked files of a pattern, without records."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", pattern], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    return [ROOT / name for name in listed if name and not name.startswith(RECORDS) and (ROOT / name).is_file()]


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield place and text of the docstrings of a module and of its public functions and classes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name = getattr(node, "name", "module")
        is_public = not name.startswith("_") or name.startswith("__")
        if is_public and (text := ast.get_docstring(node)):
            yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {name}", text


def docstring_faults(path: Path) -> Iterator[str]:
    """Yield the faults of all public docstrings of a file."""
    for place, text in docstrings(path):
        if OPENERS.match(text):
            yield f"{place}: opens with `{text.split()[0]}`, begin with a verb or a noun"
        yield from (f"{place}: {fault}" for fault in faults(text))


def sources() -> list[Path]:
    """Return the Python files whose docstrings are checked."""
    return [path for folder in CODE_FOLDERS for path in tracked(f"{folder}/*.py")]


def help_texts(command: click.Command) -> Iterator[tuple[str, str]]:
    """Yield place and help of a command and of its options."""
    yield f"moec {command.name}", command.help or ""
    for option in command.params:
        if isinstance(option, click.Option):
            # The default is no part of the sentence.
            yield f"moec {command.name} {option.opts[0]}", re.sub(r"\s*\[default.*", "", option.help or "")


def test_docstrings_are_plain() -> None:
    found = [fault for path in sources() for fault in docstring_faults(path)]
    assert found == []


def test_documents_are_plain() -> None:
    documents = tracked("*.md")
    assert len(documents) > 40
    found = [
        f"{path.relative_to(ROOT)}: {fault}" for path in documents for fault in faults(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_help_texts_are_plain() -> None:
    context, found, seen = click.Context(cli), list[str](), 0
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        for place, text in help_texts(command):
            seen += 1
            found += [f"{place}: {fault}" for fault in faults(text)]
    assert found == [] and seen > 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One two. Three `four five`: Six.", ["One two.", "Three CODE:", "Six."]),
        ("One\ntwo.\n\nThree.", ["One two.", "Three."]),
        ("- one\n  two\n- three", ["one two", "three"]),
        (
            "Return it.\n\nsize: bytes.\nrows, columns: counts.",
            ["Return it.", "size: bytes.", "rows, columns: counts."],
        ),
        ("One.\n```\ncode here\n```\n| a | b |\n# Title\nTwo.", ["One.", "Two."]),
        ("One.\n\n\b\nmoec run A\nmoec run B\n\nTwo.", ["One.", "Two."]),
        ("See [the page](docs/page.md) now. [a](b.md) is **bold.** it", ["See the page now.", "a is **bold.", "it"]),
    ],
)
def test_texts_are_divided_into_sentences(text: str, expected: list[str]) -> None:
    assert list(sentences(text)) == expected


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (" ".join(["word"] * 30) + ".", 0),
        (" ".join(["word"] * 31) + ".", 1),
        ("It lies beside the bundle.", 1),
        ("The path `beside/it` is code.", 0),
        ("Nobody reads this behind the door.", 2),
    ],
)
def test_faults_are_found(text: str, count: int) -> None:
    assert len(list(faults(text))) == count


@pytest.mark.parametrize(
    ("docstring", "is_plain"),
    [
        ("Return the size.", True),
        ("Size of the file, bytes.", True),
        ("Offset of a row.", True),
        ("What is stored.", False),
        ("Of a layer.", False),
        ("Whether it fits.", False),
        ("The same, twice.", False),
    ],
)
def test_openers_of_docstrings_are_checked(tmp_path: Path, docstring: str, is_plain: bool) -> None:
    assert (OPENERS.match(docstring) is None) == is_plain


_CITATION = re.compile(r"(docs/[\w./-]+\.md), (?:section )?([A-Z][a-z]+(?: [a-z]+)*)")


def test_cited_sections_of_documents_exist() -> None:
    """`docs/format.md, Packing` in a source names a heading of that page, or the beginning of one."""
    cited = set()
    for source in subprocess.run(
        ["git", "ls-files", "*.py", "*.cpp", "*.h"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split():
        if not source.startswith("tests/"):
            cited |= set(_CITATION.findall((ROOT / source).read_text(encoding="utf-8")))
    headings = {
        page: re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE) for page, _ in cited
    }
    missing = [(page, name) for page, name in cited if not any(h.startswith(name) for h in headings[page])]
    assert len(cited) >= 8 and missing == []
