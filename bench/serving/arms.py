"""Arms of a comparison of servers: moec, and llama-server of llama.cpp with the same weights."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..yardstick.limits import read_ahead_path

ALL = "100%"
"""Share of the experts in memory without a limit."""
MARGIN_MIB = 64
"""Limit of the control group minus `--memory`."""
_READ_AHEAD_KIB = 128
_NEEDED = re.compile(r"or --memory (\d+)MiB")


@dataclass(frozen=True)
class Room:
    """Memory and sizes of the servers of a comparison.

    share: share of the experts in memory, in percent, for example `25%`.
    memory_mib: `--memory` of moec; None: no limit.
    slots: answers at once.
    context: tokens of one answer and its prompt.
    """

    share: str
    memory_mib: int | None
    slots: int
    context: int

    @property
    def limit_bytes(self) -> int | None:
        """Limit of the memory of each server, page cache included; None for none."""
        return None if self.memory_mib is None else (self.memory_mib + MARGIN_MIB) << 20


class Arm(Protocol):
    """A server that is compared.

    ignores_end: whether its requests have `ignore_eos`; else the end token gets a bias.
    """

    @property
    def name(self) -> str: ...

    @property
    def ignores_end(self) -> bool: ...

    def command(self, room: Room) -> list[str]:
        """Return the command line."""
        ...


@dataclass(frozen=True)
class OwnArm:
    """`moec serve` by some Python. extra: more options."""

    name: str
    python: str
    bundle: Path
    extra: tuple[str, ...] = ()
    ignores_end: bool = False

    def command(self, room: Room) -> list[str]:
        """Return the command line."""
        cache = [] if room.share == ALL else ["--expert-cache", room.share]
        memory = [] if room.memory_mib is None else ["--memory", f"{room.memory_mib}MiB"]
        sizes = ["--slots", str(room.slots), "--context", str(room.context)]
        served = ["serve", str(self.bundle), "--port", "0", *sizes, *cache, *memory, *self.extra]
        return [self.python, "-m", "moec.cli.main", *served]

    def needed_mib(self, share: str, slots: int, context: int) -> int:
        """Return the least `--memory` with which a share of the experts is in memory, as moec's refusal names it.

        Raises RuntimeError if there is no such refusal.
        """
        command = self.command(Room(share, 1, slots, context))
        stderr = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stderr
        match = _NEEDED.search(stderr)
        if match is None:
            raise RuntimeError(f"moec does not say which memory it needs: {stderr[-500:]}")
        return int(match[1])


@dataclass(frozen=True)
class PeerArm:
    """llama-server with parallel slots, continuous batching, and keys and values of 16 bits, which are its defaults.

    In memory, rows are repacked when the model loads. With less memory the file is mapped.
    program: path of llama-server.
    gguf: the weights of the bundle.
    """

    name: str
    program: str
    gguf: Path
    threads: int = 2
    ignores_end: bool = True

    def command(self, room: Room) -> list[str]:
        """Return the command line."""
        loads = ["--load-mode", "none"] if room.share == ALL else ["--load-mode", "mmap", "--no-repack"]
        sizes = ["--parallel", str(room.slots), "--ctx-size", str(room.slots * room.context)]
        threads = ["--threads", str(self.threads), "--threads-batch", str(self.threads)]
        listens = ["--host", "127.0.0.1", "--port", "0", "--cache-ram", "0"]
        return [self.program, "--model", str(self.gguf), *listens, *sizes, *threads, *loads]


@contextlib.contextmanager
def short_read_ahead(place: Path) -> Iterator[None]:
    """Set the read-ahead of the device of a folder to the best one for llama.cpp under a limit, and restore it."""
    path = read_ahead_path(place)
    before = path.read_text()
    path.write_text(str(_READ_AHEAD_KIB))
    try:
        yield
    finally:
        path.write_text(before)
