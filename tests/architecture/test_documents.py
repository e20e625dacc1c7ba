"""Documents point to existing files. Commands parse, Python blocks print what is shown, the guide to a fleet runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from moec.cli.main import cli
from moec.cli.options.set_option import SetOption, parse_setting

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXPERIMENTS = DOCS / "experiments"
# Records of their date: they name files as they were.
RECORDS = ("bench/results/", "docs/experiments/2026", "CHANGELOG.md")
# Stands for any name in an instruction: `compiler/families/NAME.py`.
PLACEHOLDER = "NAME"

LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
CODE_SPAN = re.compile(r"`([^`]+)`")
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
# A path may be followed by the place in the file: `bench/kernels/speed.py:12`.
NAMED_PATH = re.compile(r"(?:\./)?((?:docs|bench)/[^\s:]*|(?:runtime|compiler)/[^\s:]*\.py)(?::\d+)?[.,;)]*")
MODULE = re.compile(r"bench(?:\.\w+)+")
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
# Generated from the commands: its command lines have explanations and placeholders.
GENERATED = "docs/cli.md"
BETWEEN_BLOCKS = "# next block"
GUIDE = DOCS / "guides" / "from-checkpoint-to-fleet.md"
BLOCK = re.compile(r"^```\n(\$ .*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)$", re.MULTILINE)


def documents() -> list[Path]:
    """Return the tracked Markdown files of the present, without records."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    return [ROOT / name for name in listed if name and not name.startswith(RECORDS) and (ROOT / name).is_file()]


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


def shell_commands(text: str) -> Iterator[list[str]]:
    """Yield the words after `moec` of every command in shell text: lines with comments, pipes and continuations."""
    for line in text.replace("\\\n", " ").splitlines():
        if "moec " not in line:
            continue
        lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in (*lexer, ";"):
            if not set(word) <= set("|&;"):
                words.append(word)
                continue
            if words[:1] == ["moec"] and not words[1].isupper():
                yield words[1:]
            words = []


def command_error(words: list[str]) -> str:
    """Return why the command line does not read these words, empty if it does. Nothing runs, no file is opened."""
    name, *arguments = words
    outer = click.Context(cli, info_name="moec")
    command = cli.get_command(outer, name)
    if command is None:
        return f"no command {name}"
    context = click.Context(command, outer, info_name=name)
    try:
        values, left, _ = command.make_parser(context).parse_args(arguments)
        for option in command.params:
            given = values.get(str(option.name))
            if isinstance(option.type, click.Choice) and given is not None:
                for value in given if isinstance(given, list) else [given]:
                    option.type.convert(value, option, context)
            if isinstance(option, SetOption):
                for text in given or ():
                    parse_setting(option.table, text)
    except click.UsageError as error:
        return error.format_message()
    return f"unexpected {' '.join(left)}" if left else ""


def wrong_commands(text: str) -> Iterator[str]:
    """Yield command lines of a document that `moec` does not read.

    Text in a code span may end with the option that it is about.
    """
    blocks = ["\n".join(block.splitlines()[1:-1]) for block in FENCED.findall(text)]
    spans = CODE_SPAN.findall(FENCED.sub("", text))
    for words in (words for block in blocks for words in shell_commands(block)):
        if error := command_error(words):
            yield f"moec {shlex.join(words)}: {error}"
    for words in (words for span in spans for words in shell_commands(" ".join(span.split()))):
        error = command_error(words)
        if error and command_error([*words, "1"]):
            yield f"moec {shlex.join(words)}: {error}"


def python_blocks(text: str) -> list[tuple[str, str | None]]:
    """Return the Python blocks of a page, each with the block of text that follows it at once: its output."""
    return [(code, output or None) for code, output in PYTHON_BLOCK.findall(text)]


def pages_of(navigation: Any) -> Iterator[str]:
    """Yield the pages of a navigation of mkdocs.yml."""
    if isinstance(navigation, str):
        yield navigation
        return
    for part in navigation.values() if isinstance(navigation, dict) else navigation:
        yield from pages_of(part)


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


def test_links_of_the_site_stay_inside_it() -> None:
    """The site has the pages below docs/ alone."""
    pages = [path for path in documents() if path.is_relative_to(DOCS)]
    links = [
        (path, link.partition("#")[0])
        for path in pages
        for link in LINK.findall(CODE_SPAN.sub("", FENCED.sub("", path.read_text(encoding="utf-8"))))
        if not re.match(r"[a-z]+:", link)
    ]
    outside = [(path, link) for path, link in links if not (path.parent / link).resolve().is_relative_to(DOCS)]
    folders = [(path, link) for path, link in links if (path.parent / link).is_dir() and link]
    assert outside == folders == [] and len(links) > 100


def test_the_navigation_has_every_page_once() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = [path.relative_to(DOCS).as_posix() for path in documents() if path.is_relative_to(DOCS)]
    shown = [page for page in pages if not page.startswith("experiments/")] + ["experiments/README.md"]
    assert sorted(pages_of(settings["nav"])) == sorted(shown)


def test_command_lines_parse() -> None:
    found, seen = [], 0
    for document in documents():
        if document.is_relative_to(EXPERIMENTS) or document == ROOT / GENERATED:
            continue
        text = document.read_text(encoding="utf-8")
        seen += len(list(shell_commands("\n".join(FENCED.findall(text)))))
        found += [f"{document.relative_to(ROOT)}: {error}" for error in wrong_commands(text)]
    assert found == [] and seen > 30


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_python_blocks_print_what_the_page_shows(page: str) -> None:
    """All blocks of a page run in one process, in their order, with the bundle of the examples."""
    blocks = python_blocks((ROOT / page).read_text(encoding="utf-8"))
    marked = [f"{code}\nprint({BETWEEN_BLOCKS!r}, flush=True)\n" for code, _ in blocks]
    run = subprocess.run([sys.executable, "-c", "".join(marked)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    printed = [part.removeprefix("\n").rstrip() for part in run.stdout.split(BETWEEN_BLOCKS)[:-1]]
    assert len(printed) == len(blocks) > 0
    shown = [(text or "").rstrip() if text is not None else out for (_, text), out in zip(blocks, printed, strict=True)]
    assert printed == shown


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
    ("text", "is_wrong"),
    [
        ("```\nmoec run x --prompt $'a\\nb' --memory 2GiB  # a comment\n```\n", False),
        ("```\necho hello | moec run x --prompt - && moec verify x\n```\n", False),
        ("```\nmoec run x \\\n    --prompt y\n```\n", False),
        ("`moec bench --trace-out`, `moec compile --fallback-bits` and `moec COMMAND --help`", False),
        ("```\n$ moec inspect x y\n```\n", True),
        ("```\nmoec run x --promt y\n```\n", True),
        ("```\nmoec run x --set policy=newest\n```\n", True),
        ("```\nmoec run x --memory\n```\n", True),
        ("```\nmoec start x\n```\n", True),
        ("`moec bench --trace-to`", True),
    ],
)
def test_wrong_command_lines_are_found(text: str, is_wrong: bool) -> None:
    assert bool(list(wrong_commands(text))) == is_wrong


def test_python_blocks_have_the_output_that_follows_at_once() -> None:
    page = "```python\na\n```\n\n```text\n1\n```\n\n```python\nb\n```\n\nWords.\n\n```text\n2\n```\n"
    assert python_blocks(page) == [("a\n", "1\n"), ("b\n", None)]


@pytest.mark.slow
def test_the_commands_of_the_guide_succeed_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    blocks = [block for block in BLOCK.findall(GUIDE.read_text(encoding="utf-8")) if "\nerror: " not in block]
    shown = [command for block in blocks for command in COMMAND.findall(block.replace("\\\n", " "))]
    for command in shown:
        words = ["bash", "-c", f"exec 2>&1; {command}"]
        run = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, f"{command}\n{run.stdout}"
    assert len(shown) >= 14
