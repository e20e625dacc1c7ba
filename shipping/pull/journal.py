"""The journal of a pull: which ranges of which files are on the disk. A killed pull goes on from there.

Lines of text, in the order of events:

    moec-journal 1 DIGEST   head: SHA-256 of the bundle's `moec.json`
    B BOOT                  a pull begins or goes on; BOOT names the start of the system
    F FILE START END        a range is written; FILE is the number of the file in the manifest
    R FILE                  all ranges of a file are void
    S COUNT                 the bytes of the first COUNT lines are durable

After a restart of the system, lines that no `S` counts are ignored, because a power cut may have taken their bytes.
The last line may be cut. Nothing else is expected to be wrong, because the disk is trusted; and every file is compared
with its SHA-256 in any case.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, bisect_right
from pathlib import Path

from moec.manifests.files.input_file import UnreadableFile, read_input

MAX_JOURNAL_BYTES = 64 << 20
_FILE = re.compile(r"F ([0-9]{1,9}) ([0-9]{1,18}) ([0-9]{1,18})")
_DURABLE = re.compile(r"S ([0-9]{1,9})")
_RESET = re.compile(r"R ([0-9]{1,9})")
_HEAD = "moec-journal 1 "
_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")


def boot_name(file: Path = _BOOT_FILE) -> str:
    """Return a name of this start of the system; empty if the system has none."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return text if re.fullmatch(r"[0-9a-f-]{1,64}", text) else ""


class Journal:
    """An open journal. One thread writes at a time.

    digest: SHA-256 of the bundle's `moec.json`.
    boot: name of this start of the system, or empty.
    line_count: number of lines.
    """

    def __init__(self, path: Path, digest: str, boot: str) -> None:
        """Open or make a journal. Raises OSError."""
        head = _HEAD + digest
        lines = _lines(path, head)
        self.line_count = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags | (0 if lines else os.O_TRUNC), 0o666)
        try:
            self._write("" if lines else head)  # the empty text ends a line that was cut
            self.line_count += len(lines)
            self._write(f"B {boot}")
        except BaseException:
            self.close()
            raise

    def finish(self, file: int, start: int, end: int) -> None:
        """Note that a range is written. Raises OSError."""
        self._write(f"F {file} {start} {end}")

    def reset(self, file: int) -> None:
        """Note that no range of a file counts any more. Raises OSError."""
        self._write(f"R {file}")

    def settle(self, line_count: int) -> None:
        """Note that the bytes of the first lines are durable. Raises OSError."""
        self._write(f"S {line_count}")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, line: str) -> None:
        data = f"{line}\n".encode()
        while data:
            data = data[os.write(self._descriptor, data) :]
        self.line_count += 1


def _lines(path: Path, head: str) -> list[str]:
    """Return the complete lines of a journal; none if it belongs to another bundle."""
    try:
        lines = read_input(path, MAX_JOURNAL_BYTES).decode("ascii").split("\n")[:-1]
    except (UnreadableFile, UnicodeDecodeError):
        return []
    return lines if lines and lines[0] == head else []


def finished_ranges(path: Path, digest: str, boot: str) -> dict[int, Intervals]:
    """Return the finished ranges of each file that a journal notes.

    boot: name of this start of the system; empty: unknown, so that only durable ranges count.
    """
    lines = _lines(path, _HEAD + digest)
    durable = max((int(match[1]) for line in lines if (match := _DURABLE.fullmatch(line))), default=0)
    finished: dict[int, Intervals] = {}
    is_this_boot = False
    for at, line in enumerate(lines):
        if line.startswith("B "):
            is_this_boot = bool(boot) and line == f"B {boot}"
        elif match := _RESET.fullmatch(line):
            finished.pop(int(match[1]), None)
        elif (at < durable or is_this_boot) and (match := _FILE.fullmatch(line)):
            finished.setdefault(int(match[1]), Intervals()).add(int(match[2]), int(match[3]))
    return finished


class Intervals:
    """A set of bytes as half-open ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add the bytes from `start` to before `end`."""
        if start >= end:
            return
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def clear(self) -> None:
        self._starts.clear()
        self._ends.clear()

    @property
    def size_bytes(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def has(self, start: int, end: int) -> bool:
        return start >= end or self.end_from(start) >= end

    def end_from(self, start: int) -> int:
        """Return the first byte from `start` on that is not there."""
        at = bisect_right(self._starts, start) - 1
        return max(start, self._ends[at]) if at >= 0 else start

    def overlap_bytes(self, start: int, end: int) -> int:
        """Return how many bytes of a range are there."""
        return (end - start) - sum(max(0, min(end, gap_end) - max(start, gap)) for gap, gap_end in self.missing(end))

    def missing(self, size_bytes: int) -> list[tuple[int, int]]:
        """Return the ranges below `size_bytes` that are not there, in order."""
        starts, ends = [0, *self._ends], [*self._starts, size_bytes]
        return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
