"""Sizes, tables, progress, colour."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from moec.cli.terminal import output
from moec.cli.terminal.compile_log import CompileLog
from moec.cli.terminal.progress_bar import ProgressBar
from moec.manifests.errors import OptionError


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
