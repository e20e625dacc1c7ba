"""Documents point to files that exist. Commands parse.

Python blocks print what the page shows. Outputs in the guides have the figures of the commands, as far as these do not
depend on time.
"""

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
from click.testing import CliRunner

from moec.cli.main import cli
from moec.cli.options.set_option import SetOption, parse_setting

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXPERIMENTS = DOCS / "experiments"
GUIDES = [DOCS / "tutorial.md", *(DOCS / "guides").glob("*.md")]
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
# Figures of an output that depend neither on time nor on which read ends first.
STEADY = re.compile(
    r"^(?:bundle|model|files|experts|  padded|  left out|dense|bits per weight|memory floor|calibration)  .*"
    r"|^read per token .* cold cache|^bits per layer.*|^layer \d.*|^tokens .*|^supported: .*"
    r"|expert cache (?:from )?[\d.]+ MiB(?: \(\d+% of experts\))?|(?<=in )\d+ lookups|recall [\d.]+ %"
    r"|^items: .*|^exact_match .*|[\d.]+ MiB a token(?=:)|[\d.]+ [KM]iB a token expected with a cache of [\d.]+ [KM]iB"
    r"|^ *\d+%  [a-z-]+ +\d+ +[\d.]+ % +[\d.]+ MiB +[\d.]+$"
    r"|^(?:lossless|dynamic-precision|big-little|cache-routing)[^|]*? 0\.\d{4}  .*? \d\.\d{4}(?= )"
    r"|^trace +.*decoded|^memory +leaves .*|(?:replaced|dropped|skipped) +[\d.]+ %"
    r"|^llama\.cpp  .*|^ {4}\d  iq\d.*|^ <<.*|^####.*|^packed .*|^unpacked .*|.* is whole: .*",
    re.MULTILINE,
)
# Figures that a page shows at least.
LEAST_FIGURES = {"tutorial.md": 20, "run-under-a-budget.md": 8, "measure-and-tune.md": 10, "choose-lossy-modes.md": 2}
# Minutes of work: `MOEC_SLOW=1` runs it too.
SLOW_COMMAND = "--modes sweep"
# Appended to an evaluation whose output a page does not show: few items show that it succeeds.
FEW_ITEMS = " --limit 8"
# They load torch, which this process has. What they refuse does not depend on the memory of the process.
COMMANDS_WITH_TORCH = ("moec compile ", "moec export ")
TIMED_COMMANDS = ("moec tune", "moec compile", "moec profile-device")  # they time alternatives, or compile
# Generated from the commands: its command lines have explanations and placeholders.
GENERATED = "docs/cli.md"
BETWEEN_BLOCKS = "# next block"


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


def failing_blocks(text: str) -> list[str]:
    """Return the fenced blocks that show a command and its error."""
    return [block for block in FENCED.findall(text) if re.search(r"^error: ", block, re.MULTILINE)]


def shown_outputs(text: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a page that work on the shipped bundle or a copy, each with the output that is shown."""
    for block in FENCED.findall(text):
        if block in failing_blocks(block):
            continue
        for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            uses_bundle = "examples/bundle" in command or "example-moec" in command
            if uses_bundle and not command.startswith(TIMED_COMMANDS):
                yield command, output.removesuffix("```").rstrip()


def steady_figures(text: str) -> list[str]:
    """Return the figures of an output that do not depend on time, with white space collapsed."""
    return [" ".join(found[0].split()) for found in STEADY.finditer(text)]


def messages(text: str) -> list[str]:
    """Return errors, hints and warnings, also of several lines. Numbers become 0: bytes depend on the machine."""
    found = re.findall(r"^(?:error|hint|warning): .*(?:\n(?!\w+: |\$ |\[|```).+)*", text, re.MULTILINE)
    return [re.sub(r"\d+", "0", " ".join(message.split())) for message in found]


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


@pytest.mark.parametrize("page", sorted(GUIDES), ids=lambda path: path.name)
def test_errors_in_the_guides_are_those_of_the_commands(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands of a block that shows an error run in a folder with the examples. Their messages are compared."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for block in failing_blocks(page.read_text(encoding="utf-8")):
        commands = re.findall(r"^\$ (.*)$", block.replace("\\\n", " "), re.MULTILINE)
        assert commands and messages("".join(told_by(command) for command in commands)) == messages(block), block


def in_shell(command: str, folder: Path, stderr: int = subprocess.STDOUT) -> subprocess.CompletedProcess[str]:
    """Run a command line in a folder, with `moec` of this environment. stderr: where messages go."""
    own = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    words = ["bash", "-c", command]
    return subprocess.run(words, cwd=folder, env=own, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False)


def told_by(command: str) -> str:
    """Run a command line in the present folder. Return its messages."""
    if command.startswith(COMMANDS_WITH_TORCH):
        return CliRunner().invoke(cli, shlex.split(command)[1:]).stderr
    return in_shell(command, Path(), subprocess.PIPE).stderr


def figures_differ(page: Path, folder: Path, is_slow: bool) -> tuple[list[str], int]:
    """Run the commands of a page in a folder with the examples. Return wrong figures, and the number of right ones."""
    (folder / "examples").symlink_to(ROOT / "examples")
    wrong, right = list[str](), 0
    for command, shown in shown_outputs(page.read_text(encoding="utf-8")):
        if (SLOW_COMMAND in command) != is_slow and not command.startswith("cp "):
            continue
        run = in_shell(command if shown or not command.startswith("moec eval ") else command + FEW_ITEMS, folder)
        assert run.returncode == 0, f"{command}\n{run.stdout}"
        printed = steady_figures(run.stdout)
        # A line that the page shortens ends with `...`.
        found = [figure.removesuffix("...").rstrip() for figure in steady_figures(shown)]
        right += len(found)
        wrong += [f"{command}: {each}" for each in found if not any(line.startswith(each) for line in printed)]
    return wrong, right


@pytest.mark.parametrize("page", sorted(GUIDES), ids=lambda path: path.name)
def test_outputs_in_the_guides_have_the_figures_of_the_commands(page: Path, tmp_path: Path) -> None:
    """Figures of the shipped bundle that do not depend on time. The others, such as speeds, are left out."""
    wrong, right = figures_differ(page, tmp_path, is_slow=False)
    assert wrong == []
    assert right >= LEAST_FIGURES.get(page.name, 0), "the patterns of steady figures find less than before"


@pytest.mark.slow
def test_costs_of_lossy_modes_in_the_guide_are_those_of_the_command(tmp_path: Path) -> None:
    wrong, right = figures_differ(DOCS / "guides" / "choose-lossy-modes.md", tmp_path, is_slow=True)
    assert wrong == [] and right > 5


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


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("expert cache        hit rate 98.8 %, 5 misses in 414 lookups, 0 rereads\n", ["414 lookups"]),
        ("per token (TPOT)    p50 0.46 ms, p95 16.71 ms, 326.9 tokens/s\nstall   8.66 ms\n", []),
        ("mode: lossless; expert cache 0.9 MiB (50% of experts), ...\n", ["expert cache 0.9 MiB (50% of experts)"]),
        ("  50%  lrfu               636    59.4 %  27.9 MiB       1.83\n", ["50% lrfu 636 59.4 % 27.9 MiB 1.83"]),
        ("lossless   0.9267  -     0.0000     306.5  60.7 %\n", ["lossless 0.9267 - 0.0000"]),
    ],
)
def test_steady_figures_are_found(text: str, figures: list[str]) -> None:
    assert steady_figures(text) == figures


def test_shown_outputs_are_those_of_the_bundle() -> None:
    run = "$ moec inspect examples/bundle\nfiles  3\n...\n$ moec run other\nx\n$ moec tune example-moec\ny\n"
    failing = "$ moec run examples/bundle\nerror: no\n"
    assert list(shown_outputs(f"```\n{run}```\n\n```\n{failing}```\n")) == [
        ("moec inspect examples/bundle", "files  3\n...")
    ]
