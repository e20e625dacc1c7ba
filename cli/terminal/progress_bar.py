"""The bar of long work, on stderr: share and time left."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

from .output import human_seconds, one_line

REDRAW_S = 0.1
LINE_EVERY_S = 10.0
BAR_CELLS = 24
LEAST_SHARE = 0.02
"""Share from which on the time left is shown. Work that goes on side by side finishes little at its beginning."""


class ProgressBar:
    """A callback (done, total) that draws a bar with the time left. Without a terminal it writes a line every 10 s.

    with ProgressBar("reading") as progress:
        verify_bundle(bundle, progress)
    """

    def __init__(
        self,
        label: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        whole: Callable[[float, float], tuple[float, float]] | None = None,
    ) -> None:
        """whole: takes the share and the seconds of this work; returns the share and the seconds left of the whole."""
        self.label, self._whole = one_line(label), whole
        self._stream: TextIO | None = sys.stderr if stream is None else stream  # None: stderr is closed
        self._clock = clock
        self._is_terminal = self._stream is not None and self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._started = self._drawn = clock()
        self._line = ""

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._line and self._is_terminal:
            self._write("\r" + " " * len(self._line) + "\r")

    def __call__(self, done: float, total: int) -> None:
        """Report that `done` of `total` are finished. A call is cheap enough for every item."""
        now = self._clock()
        if now - self._drawn < (REDRAW_S if self._is_terminal else LINE_EVERY_S):
            return
        self._drawn = now
        before = len(self._line)
        self._line = self._render(done, total, now - self._started)
        self._write(f"\r{self._line.ljust(before)}" if self._is_terminal else f"{self._line}\n")

    def _render(self, done: float, total: int, elapsed_s: float) -> str:
        share = min(1.0, done / total) if total > 0 else 0.0
        left = f", {human_seconds(elapsed_s * (1 - share) / share)} left" if share >= LEAST_SHARE else ""
        if self._whole is not None:
            whole_share, whole_left_s = self._whole(share, elapsed_s)
            left += f"; whole {whole_share:.0%}, {human_seconds(whole_left_s)} left"
        if not self._is_terminal:
            return f"{self.label}: {share:.0%}{left}"
        filled = round(share * BAR_CELLS)
        return f"{self.label} [{'#' * filled}{'.' * (BAR_CELLS - filled)}] {share:4.0%}{left}"

    def _write(self, text: str) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.write(text)
                self._stream.flush()
