"""Messages of a compile while it runs, the cost of each stage, and the inputs that its log names."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moec.manifests.bundle import PARTIAL_SUFFIX, WORK_SUFFIX
from moec.manifests.errors import OptionError
from moec.manifests.files.input_file import UnreadableFile, read_input
from moec.manifests.files.limits import LOG_JSON, MAX_LOG_BYTES
from moec.manifests.files.strict_json import load_strict_json

from ..interrupts import is_interrupt
from . import output
from .progress_bar import ProgressBar
from .whole_compile import WholeCompile

DONE = "done"
LOG_SUFFIX = ".log.json"
"""What the name of a log adds to the name of its bundle."""
LOG_MARK = re.compile(rb'\A\{\s*"events": \[\s*\{\s*"seconds": ')


class CompileLog:
    """Notes and progress on stderr, the same with times for `NAME.log.json`, and the cost of each stage.

    destination: folder of the bundle.
    has_resume: whether the command has `--resume`.
    sources: paths of checkpoint and data, as `model` and `data`.
    work: folder with results of finished stages. It is next to the destination unless it is set.

    with CompileLog(destination) as log:
        compile_checkpoint(... Talk(log.note, log.progress))
    """

    def __init__(self, destination: Path, has_resume: bool = True) -> None:
        self._start = time.monotonic()
        self._bar: ProgressBar | None = None
        self.destination, self._has_resume = destination, has_resume
        self._running: tuple[str, float] | None = None
        self._stages: dict[str, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.sources: dict[str, str] = {}
        self.work = destination.with_name(destination.name + WORK_SUFFIX)
        self._whole: WholeCompile | None = None

    def stages(self) -> list[dict[str, Any]]:
        """Return the cost of every kind of work with a bar, in order of appearance: the sum over all its bars.

        peak_memory_bytes: peak of the process until the last bar ended.
        disk_bytes: largest size of the files next to the destination at the end of a bar: results of finished stages,
            and an incomplete bundle.
        """
        return list(self._stages.values())

    def note(self, sentence: str) -> None:
        """Print one sentence and record it."""
        self._close_bar()
        self._event(sentence)
        output.say(f"[{output.human_seconds(time.monotonic() - self._start)}] {sentence}")

    def progress(self, title: str) -> Callable[[int, int], None]:
        """Return a callback (done, total) that draws a bar."""
        state: dict[str, Any] = {}

        def report(done: int, total: int) -> None:
            if state.get("bar") is None or done < state["done"]:
                self._close_bar()
                self._event(title)
                self._running = title, time.monotonic()
                whole = None if self._whole is None else self._whole.begun(title)
                state["bar"] = self._bar = ProgressBar(title, whole=whole)
                self._bar.__enter__()
            state["done"] = done
            state["bar"](done, total)
            if done >= total:
                self._close_bar()
                state["bar"] = None

        return report

    def forecast(self, stages: Sequence[dict[str, Any]], shorter: tuple[str, float] | None) -> None:
        """Print what a compile takes, and let its bars show the share of the whole.

        stages: their forecast, as for `forecast_table`.
        shorter: the option that brings the time nearest to half, and the seconds with it.
        """
        self._whole = WholeCompile({stage["title"]: stage["seconds"] for stage in stages})
        most = {name: max(stage[name] for stage in stages) for name in ("memory_bytes", "disk_bytes")}
        time_text, size = output.human_seconds, output.human_bytes
        dearest = sorted(stages, key=lambda stage: -stage["seconds"])[:3]
        named = ", ".join(f"{stage['title']} {time_text(stage['seconds'])}" for stage in dearest)
        self.note(f"this compile takes about {time_text(sum(stage['seconds'] for stage in stages))}: {named}")
        faster = "" if shorter is None else f"; about {time_text(shorter[1])} with `{shorter[0]}`"
        self.note(f"at most {size(most['memory_bytes'])} of memory, {size(most['disk_bytes'])} of disk{faster}")

    def __enter__(self) -> CompileLog:
        return self

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        """Remove the last bar, also after an error. After an interrupt, say how to continue."""
        if problem is None:
            self.done()
            return
        self._close_bar()
        self._event("failed")
        if self._has_resume and is_interrupt(problem) and self.work.exists():
            output.say(f"finished stages are in `{self.work}`; the same command with `--resume` continues")

    def done(self) -> None:
        """Record once that the compile is complete."""
        self._close_bar()
        if not self.events or self.events[-1]["event"] != DONE:
            self._event(DONE)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.__exit__()
            self._bar = None
        if self._running is not None:
            from moec.runtime.trace.statistics import peak_memory_bytes

            (title, started), self._running = self._running, None
            if self._whole is not None:
                self._whole.ended(title, time.monotonic() - started)
            before = self._stages.get(title, {"seconds": 0.0, "disk_bytes": 0})
            disk_bytes = 0
            for folder in (self.work, self.destination.with_name(self.destination.name + PARTIAL_SUFFIX)):
                with suppress(OSError):
                    disk_bytes += sum(path.stat().st_size for path in folder.iterdir())
            self._stages[title] = {
                "title": title,
                "seconds": round(before["seconds"] + time.monotonic() - started, 3),
                "peak_memory_bytes": peak_memory_bytes(),
                "disk_bytes": max(before["disk_bytes"], disk_bytes),
            }

    def _event(self, text: str) -> None:
        self.events.append({"seconds": round(time.monotonic() - self._start, 3), "event": text})


def stage_table(stages: Sequence[dict[str, Any]]) -> str:
    """Return the table of stages: time, peak memory of the process so far, and largest size on disk."""
    time_text, size = output.human_seconds, output.human_bytes
    rows = [
        (stage["title"], time_text(stage["seconds"]), size(stage["peak_memory_bytes"]), size(stage["disk_bytes"]))
        for stage in stages
    ]
    return output.table(rows, ["stage", "time", "peak memory so far", "on disk"])


def forecast_table(stages: Sequence[dict[str, Any]]) -> str:
    """Return the table of predicted costs of every stage, and their sum."""
    most = {name: max(stage[name] for stage in stages) for name in ("memory_bytes", "disk_bytes")}
    total = {"title": "in all", "seconds": sum(stage["seconds"] for stage in stages), **most, "work": ""}
    time_text, size = output.human_seconds, output.human_bytes
    rows = [
        (row["title"], time_text(row["seconds"]), size(row["memory_bytes"]), size(row["disk_bytes"]), row["work"])
        for row in (*stages, total)
    ]
    return output.table(rows, ["stage", "time", "memory at most", "on disk at most", "for"])


def measurement_inputs(bundle: Path, model: str | None, data: str | None) -> tuple[str, str]:
    """Return the checkpoint and the data of a bundle's compile.

    bundle: the folder, as an absolute path.
    model, data: values of `--model` and `--data`. None: from the log next to the bundle.
    Raises OptionError if a path is neither given nor in the log.
    """
    try:
        log = load_strict_json(read_input(bundle.with_name(bundle.name + LOG_SUFFIX), MAX_LOG_BYTES), LOG_JSON)
    except (UnreadableFile, ValueError):
        log = None
    texts = {name: text for name, text in log.items() if isinstance(text, str)} if isinstance(log, dict) else {}
    model, data = model or texts.get("model"), data or texts.get("data")
    if model is None or data is None:
        missing = " and ".join(
            text
            for value, text in ((model, "the checkpoint (`--model`)"), (data, "the task data (`--data`)"))
            if value is None
        )
        raise OptionError(
            f"a measurement reads the inputs of the compile, and the log next to `{bundle}` does not name {missing}",
            "name the paths of the compile",
        )
    return model, data
