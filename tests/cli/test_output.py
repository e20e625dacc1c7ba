"""What commands print: sizes, tables, progress, colour, sound JSON, and no control character of others."""

from __future__ import annotations

import io
import json
import math
import sys
import unicodedata
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from moec.cli.commands.measuring.lm_eval import write_results
from moec.cli.main import cli
from moec.cli.options.paths import sound_json, write_json_lines
from moec.cli.terminal import output
from moec.cli.terminal.compile_log import CompileLog
from moec.cli.terminal.progress_bar import ProgressBar
from moec.manifests.errors import OptionError
from tests.gates.damage import plain_manifest, seal

from .conftest import Invoke


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (7 << 40, "7.0 TiB"),
        (5 << 60, "5242880.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert output.human_bytes(count) == text


def test_human_times_and_shares() -> None:
    assert [output.human_seconds(s) for s in (0, 59.4, 75, 3725)] == ["0:00", "0:59", "1:15", "1:02:05"]
    assert output.human_share(0.1234) == "12.3 %" and output.human_share(None) == "-"
    assert output.human_ms(1_500_000) == "1.50 ms" and output.human_ms(None) == "-"


def test_table_puts_numbers_to_the_right() -> None:
    text = output.table([("a", 1, "2 x q4"), ("long", 200, "12 x q8")], ("name", "n", "formats"))
    assert text.splitlines() == [
        "name    n  formats",
        "----  ---  -------",
        "a       1  2 x q4",
        "long  200  12 x q8",
    ]
    assert output.table([]) == ""


def test_progress_on_a_terminal_is_a_bar_that_goes_away() -> None:
    stream, clock = Terminal(), Clock()
    with ProgressBar("reading", stream, clock) as progress:
        progress(0, 10)
        assert stream.getvalue() == ""
        clock.now = 10.0
        progress(5, 10)
        shown = stream.getvalue()
        progress(6, 10)
        assert stream.getvalue() == shown, "redrawn at once"
    assert shown == "\rreading [############............]  50%, 0:10 left"
    assert stream.getvalue().endswith("\r" + " " * (len(shown) - 1) + "\r")


def test_progress_elsewhere_is_a_line_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressBar("reading", stream, clock) as progress:
        for second in range(31):
            clock.now = float(second)
            progress(second, 40)
    assert stream.getvalue().splitlines() == [
        "reading: 25%, 0:30 left",
        "reading: 50%, 0:20 left",
        "reading: 75%, 0:10 left",
    ]


def test_progress_of_nothing_does_not_divide() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressBar("reading", stream, clock) as progress:
        clock.now = 11.0
        progress(0, 0)
    assert stream.getvalue() == "reading: 0%\n"


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream, clock = Terminal(), Clock()
    progress = ProgressBar("reading", stream, clock)
    clock.now = 11.0
    progress(1, 2)
    assert stream.getvalue() == "reading: 50%, 0:11 left\n"


@pytest.mark.parametrize(("no_colour", "has_colour"), [(None, True), ("1", False)])
def test_no_color_is_respected(no_colour: str | None, has_colour: bool) -> None:
    @click.command()
    def command() -> None:
        output.error(OptionError("wrong", "right"))

    result = CliRunner().invoke(command, env={"NO_COLOR": no_colour}, color=True)
    assert ("\x1b[" in result.stderr) is has_colour


def test_json_is_one_line_and_strict(capsys: pytest.CaptureFixture[str]) -> None:
    output.data_json({"a": "é", "b": [1, None]})
    assert capsys.readouterr().out == '{"a": "é", "b": [1, null]}\n'
    with pytest.raises(ValueError, match="JSON"):
        output.data_json({"a": float("nan")})


def test_blocks_grow() -> None:
    assert [output.block(share) for share in (-1, 0, 1, 2)] == ["▁", "▁", "█", "█"]


def test_a_compile_that_fails_leaves_no_bar_under_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, log = Terminal(), CompileLog(tmp_path / "out")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("moec.cli.terminal.progress_bar.REDRAW_S", 0.0)
    monkeypatch.setattr("moec.runtime.trace.statistics.peak_memory_bytes", lambda: 7 << 20)
    with pytest.raises(OptionError), log:
        log.progress("calibrating")(1, 2)
        raise OptionError("no", "do")
    assert "calibrating" in terminal.getvalue() and terminal.getvalue().rsplit("\r", 2)[1].strip() == ""
    assert terminal.getvalue().endswith("\r")
    (stage,) = log.stages()
    assert (stage["title"], stage["peak_memory_bytes"]) == ("calibrating", 7 << 20)
    assert [event["event"] for event in log.events] == ["calibrating", "failed"]


@pytest.mark.parametrize("has_resume", [True, False])
def test_an_interrupted_compile_names_resume_if_the_command_has_it(
    has_resume: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.work").mkdir()
    with pytest.raises(KeyboardInterrupt), CompileLog(tmp_path / "out", has_resume):
        raise KeyboardInterrupt
    assert ("out.work`; the same command with `--resume` continues" in capsys.readouterr().err) == has_resume


TITLE = "\x1b]0;owned\x07\x9b31m\u202e\u2066\u061c\r\nmoec: all is well"


def drives_a_terminal(text: str) -> set[str]:
    """Return whether a character is a control character except line end and tab, or changes the direction of text."""
    marks = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    return {each for each in text if each in marks or (unicodedata.category(each) == "Cc" and each not in "\n\t")}


def test_every_control_character_is_made_visible() -> None:
    everything = "".join(map(chr, range(0x3000)))
    found = output.shown(everything)
    assert drives_a_terminal(everything) and not drives_a_terminal(found)
    assert len(drives_a_terminal(everything)) == 32 + 1 + 32 - 2 + 12, "the test's own idea of them"
    assert output.shown("é\t\u4e16\n\U0001f600 e\u0301") == "é\t\u4e16\n\U0001f600 e\u0301", "text stays as it is"
    assert output.shown("\x1b\r\x85\u202e\udcff") == r"\x1b\r\x85\u202e\udcff"
    found.encode()


@pytest.mark.parametrize("where", ["table", "header", "facts"])
def test_a_value_keeps_to_its_line(where: str) -> None:
    text = {
        "table": lambda: output.table([("a", TITLE)], ("b", "c")),
        "header": lambda: output.table([("a", "b")], ("c", "d")) + output.table([(TITLE, 1)]),
        "facts": lambda: output.facts([("name", TITLE), ("other", 1)]),
    }[where]()
    assert not drives_a_terminal(text) and "\nmoec: all is well" not in text


def test_an_error_keeps_to_its_line_but_a_list_of_problems_has_several() -> None:
    runner = CliRunner()
    with runner.isolation(color=True) as (_, err, _):
        output.error(OptionError(f"`{TITLE}` has 2 problems:\n- one\n- two", f"hint {TITLE}"))
        written = err.getvalue().decode()
    own = "\x1b[31m\x1b[1merror:\x1b[0m", "\x1b[36mhint:\x1b[0m"
    for style in own:
        assert style in written, "our own colours stay"
        written = written.replace(style, "")
    assert not drives_a_terminal(written) and len(written.splitlines()) == 4
    assert "\nmoec: all is well" not in written


def test_json_says_the_same_without_them() -> None:
    runner = CliRunner()
    with runner.isolation() as (out, _, _):
        output.data_json({"text": TITLE + "\x7f\u4e16"})
        written = out.getvalue().decode()
    assert not drives_a_terminal(written) and json.loads(written) == {"text": TITLE + "\x7f\u4e16"}
    assert "\u4e16" in written


@pytest.mark.parametrize("field", ["name", "producer", "layout", "family", "profile", "feature"])
def test_a_bundle_cannot_drive_the_terminal(invoke: Invoke, own_bundle: Path, field: str) -> None:
    plain = plain_manifest(own_bundle)
    if field in ("name", "producer", "layout"):
        plain[field] = TITLE
    elif field == "family":
        plain["model"]["family"] = TITLE
    elif field == "profile":
        plain["device"]["profile"] = TITLE
    else:
        plain["required_cpu_features"] = [TITLE]
    seal(own_bundle, plain)
    said = ""
    for arguments in (
        ("inspect",),
        ("inspect", "--json"),
        ("verify",),
        ("run", "--prompt", "x", "--max-new-tokens", 1),
    ):
        command, *options = arguments
        result = invoke(command, own_bundle, *options)
        assert result.exit_code in (0, 1, 3), result.stderr
        if command != "run" or result.exit_code:  # text of a model is printed unchanged
            said += result.stdout
        said += result.stderr
    assert not drives_a_terminal(said) and "\nmoec: all is well" not in said
    assert r"\x1b]0;owned\x07" in said or r"\u001b]0;owned\u0007" in said, "the value is told somewhere"


@pytest.mark.parametrize(
    "arguments",
    [
        (TITLE,),
        ("run", f"--{TITLE}"),
        ("run", TITLE, "--prompt", "x"),
        ("run", "b", "--set", TITLE),
        ("run", "b", "--threads", TITLE),
        ("verify", "b", TITLE),
        ("eval", "b", "--data", TITLE),
        ("compile", TITLE, "--uniform", "4"),
    ],
)
def test_an_argument_cannot_drive_the_terminal(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exit_code in (1, 2) and result.stdout == ""
    assert not drives_a_terminal(result.stderr), result.stderr


HALF = "\ud83d"
ROWS = {
    "sound": ({"é\u2028": 1.5, "deep": [[None, True]]}, {"é\u2028": 1.5, "deep": [[None, True]]}),
    "numbers": ({"a": math.nan, "b": [math.inf, (-math.inf, 2)]}, {"a": None, "b": [None, [None, 2]]}),
    "half a pair": ({"a": f"x{HALF}y", HALF: [HALF]}, {"a": "x\ufffdy", "\ufffd": ["\ufffd"]}),
    "a pair in halves": ({"a": "\ud83d\ude00"}, {"a": "😀"}),
    "both": ({"a": {"b": [{"c": math.nan, "d": HALF}]}}, {"a": {"b": [{"c": None, "d": "\ufffd"}]}}),
    "a name that is no text": ({math.nan: 1, 2: 3}, {"nan": 1, "2": 3}),
}  # fmt: skip


def strict(line: str) -> object:
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("name", ROWS)
def test_a_line_is_sound(name: str, tmp_path: Path) -> None:
    row, expected = ROWS[name]
    write_json_lines(tmp_path / "rows", [row, {}])
    lines = (tmp_path / "rows").read_text(encoding="utf-8").split("\n")
    assert [strict(line) for line in lines[:-1]] == [expected, {}] and lines[-1] == ""
    assert "\\ud83d" not in lines[0]
    assert strict(sound_json(row, indent=1).decode()) == expected


def test_results_and_items_of_a_harness_are_sound(tmp_path: Path) -> None:
    found = {"results": {"t": {"acc": math.nan}}, "samples": {"t": [{"doc_id": 0, "resps": [[HALF, -math.inf]]}]}}
    write_results(found, tmp_path / "out", tmp_path / "items")
    assert strict((tmp_path / "out").read_text(encoding="utf-8")) == {"results": {"t": {"acc": None}}}
    (line,) = (tmp_path / "items").read_text(encoding="utf-8").splitlines()
    assert "\\ud83d" not in line and strict(line)
