"""Share and time left of a whole compile."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from moec.cli.terminal import compile_log
from moec.cli.terminal.compile_log import CompileLog
from moec.cli.terminal.progress_bar import ProgressBar
from moec.cli.terminal.whole_compile import WholeCompile

FORECAST = {
    "hashing the checkpoint": 10.0,
    "calibrating and quantizing": 100.0,
    "measuring plans by their KL": 40.0,
    "writing the bundle": 10.0,
    "KL on gsm8k": 20.0,
    "measuring the tasks": 200.0,
    "learning to look ahead": 20.0,
}


def state(whole: WholeCompile, title: str, share: float, seconds: float) -> tuple[float, float]:
    shown = whole.begun(title)
    assert shown is not None
    return shown(share, seconds)


def test_stages_weigh_as_much_as_foreseen() -> None:
    """The time of a finished stage corrects those that follow."""
    whole = WholeCompile(FORECAST)
    assert whole.begun("asking the nodes") is None
    assert state(whole, "measuring the checkpoint on validation items", 0.5, 25.0) == (25 / 400, 375)
    whole.ended("measuring the checkpoint on validation items", 50.0)
    assert state(whole, "calibrating and quantizing", 0.5, 100.0) == pytest.approx((160 / 500, 340))
    whole.ended("calibrating and quantizing", 200.0)  # twice as long as foreseen
    share, left = state(whole, "measuring plans by their KL", 0.5, 5.0)
    assert left == pytest.approx(2 * (40 + 10 + 20 + 200 + 20) - 5 - 50)
    assert share == pytest.approx(275 / (275 + left))


def test_a_bar_that_has_just_begun_does_not_tell_the_time_left() -> None:
    """Of 300 answers side by side, the first ends after a tenth of the time."""
    whole = WholeCompile(FORECAST)
    whole.begun("KL on gsm8k")
    assert state(whole, "baseline on gsm8k, items 1 to 300", 1 / 300, 20.0)[1] < 1.2 * (20 + 20 + 180)


def test_a_resumed_run_counts_what_an_earlier_one_did() -> None:
    whole = WholeCompile(FORECAST)
    assert state(whole, "writing the bundle", 0.0, 0.0) == pytest.approx((150 / 400, 250))


def test_bars_of_one_stage_follow_each_other() -> None:
    """The last bars of the tasks take longer than foreseen. Then the present bar tells the time that is left."""
    whole = WholeCompile(FORECAST)
    for title in ("writing a bundle of 3.5 bits per weight", "measuring the tasks", "KL on gsm8k"):
        whole.begun(title)
    whole.ended("baseline on gsm8k, items 1 to 500", 120.0)
    assert state(whole, "bundle on gsm8k, items 1 to 500", 0.5, 10.0)[1] == 20 + 20 + 200 - 130
    whole.ended("bundle on gsm8k, items 1 to 500", 80.0)
    assert state(whole, "bundle on gsm8k, items 501 to 1000", 0.25, 5.0)[1] == 20 + 20 + 15
    assert state(whole, "learning to look ahead", 0.5, 10.0) == pytest.approx((390 / 400, 10))


def test_one_line_shows_both() -> None:
    stream, now = io.StringIO(), [0.0]
    whole = WholeCompile({"reading": 100.0, "writing": 300.0})
    progress = ProgressBar("reading", stream, lambda: now[0], whole.begun("reading"))
    now[0] = 20.0
    progress(1, 5)
    assert stream.getvalue() == "reading: 20%, 1:20 left; whole 5%, 6:20 left\n"


def test_a_forecast_is_told_in_two_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_log, "ProgressBar", lambda title, whole: bars.append(whole) or ProgressBar(title))
    bars: list[object] = []
    stages = [
        {"title": title, "seconds": seconds, "memory_bytes": at << 30, "disk_bytes": at << 31}
        for at, (title, seconds) in enumerate(FORECAST.items())
    ]
    with CompileLog(tmp_path / "out") as log:
        log.progress("reading")(1, 2)
        log.forecast(stages, ("--limit 700", 190.0))
        log.progress("calibrating and quantizing")(1, 2)
    assert [event["event"] for event in log.events[1:3]] == [
        "this compile takes about 6:40: measuring the tasks 3:20, calibrating and quantizing 1:40, "
        "measuring plans by their KL 0:40",
        "at most 6.0 GiB of memory, 12.0 GiB of disk; about 3:10 with `--limit 700`",
    ]
    assert bars[0] is None and bars[1] is not None
    assert "about 3:10 with" in capsys.readouterr().err
