"""Commands of `moec` in one process, each with one call that fails. As a program, below the preloaded shim:

python -m tests.faults.driver SHIM SCENE FOLDER FAULT FIRST STEP LAST

It prints one JSON object per run: the number, the call that failed, the exit code and what is wrong. It ends after the
first run that made fewer calls than its number, or after LAST.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import gc
import io
import json
import os
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from tests.faults.scenes import Outcome, Scene, scene_of

READ, WRITE, SYNC, RENAME, OPEN, TRUNCATE, MAP, ALLOCATE = (1 << bit for bit in range(8))
ONCE, FROM_THEN_ON, SHORT = range(3)
ALLOWED_CODES = (0, 1, 3, 5, 75)
HANG_S = 120


@dataclass(frozen=True)
class Fault:
    """Which calls fail, with which number of errno, and in which way."""

    kinds: int
    errno: int
    way: int = ONCE


FAULTS = {
    "read": Fault(READ, errno.EIO),
    "reads": Fault(READ, errno.EIO, FROM_THEN_ON),
    "short-read": Fault(READ, 0, SHORT),
    "interrupted-read": Fault(READ, errno.EINTR),
    "write": Fault(WRITE | TRUNCATE, errno.ENOSPC),
    "writes": Fault(WRITE | TRUNCATE, errno.ENOSPC, FROM_THEN_ON),
    "short-write": Fault(WRITE, 0, SHORT),
    "sync": Fault(SYNC | RENAME, errno.EIO),
    "open": Fault(OPEN, errno.EMFILE),
    "map": Fault(MAP, errno.ENOMEM),
    "allocation": Fault(ALLOCATE, errno.ENOMEM),
}


class Shim:
    """fail_nth.c in this process."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.fail_nth_disarm.restype = ctypes.c_long
        self._library.fail_nth_call.restype = ctypes.c_char_p

    def arm(self, folder: Path, fault: Fault, number: int) -> None:
        """From now on, the call of this number fails; 0: none does."""
        name = os.fsencode(folder) + b"/"
        self._library.fail_nth_arm(name, fault.kinds, ctypes.c_long(number), fault.errno, fault.way)

    def disarm(self) -> tuple[int, str]:
        """Return the number of calls, and the one that failed."""
        count = int(self._library.fail_nth_disarm())
        return count, self._library.fail_nth_call().decode(errors="replace").strip()


def call(arguments: list[str]) -> Outcome:
    """One command, as the console script runs it."""
    from moec.cli.main import cli

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main(arguments, prog_name="moec")
            code: object = 0
        except SystemExit as ended:
            code = ended.code
    texts = []
    for stream in (out, err):
        stream.seek(0)
        texts.append(stream.read())
    return Outcome(code if isinstance(code, int) else -1, *texts)


def open_descriptors() -> int:
    """Return the number of descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def check_after(baseline: int) -> list[str]:
    """Descriptors and threads that a failed command did not give back."""
    gc.collect()
    end = time.monotonic() + 120
    while threading.active_count() > 1 and time.monotonic() < end:
        time.sleep(0.001)
    found = []
    if threading.active_count() > 1:
        found.append(f"threads left: {[thread.name for thread in threading.enumerate()]}")
    if open_descriptors() > baseline:
        found.append(f"{open_descriptors()} descriptors are open, {baseline} before")
    return found


def one_run(shim: Shim, scene: Scene, folder: Path, fault: Fault, number: int, baseline: int) -> dict[str, object]:
    """Run with the fault, check, run without it, check."""
    scene.prepare()
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    shim.arm(folder, fault, number)
    outcome = call(scene.arguments)
    count, failed = shim.disarm()
    complaints = scene.complaints(outcome)
    if outcome.code not in ALLOWED_CODES or "Traceback" in outcome.err:
        complaints.append("exit code or traceback")
    complaints += check_after(baseline)
    if failed and (outcome.code or complaints):
        complaints += scene.complaints_after(call(scene.arguments))
    faulthandler.cancel_dump_traceback_later()
    error = outcome.err[-3000:] if complaints else outcome.err.strip().rpartition("\n")[2][:200]
    return {"n": number, "calls": count, "failed": failed, "code": outcome.code, "wrong": complaints, "error": error}


def main(shim_path: str, scene_name: str, place: str, fault_name: str, first: int, step: int, last: int) -> None:
    """See the head of this file."""
    sys.stdin = open(os.devnull)  # noqa: SIM115 (the command's, until the process ends)
    shim, folder, fault = Shim(Path(shim_path)), Path(place), FAULTS[fault_name]
    scene = scene_of(scene_name, folder)
    real_out = sys.stdout
    scene.prepare()
    call(scene.arguments)  # imports
    gc.collect()
    number = 0
    while number <= last:
        baseline = open_descriptors()  # what one run left open is not held against the next
        told = one_run(shim, scene, folder, fault, number, baseline)
        print(json.dumps(told), file=real_out, flush=True)
        if number and not told["failed"]:
            return
        number = number + step if number else first


if __name__ == "__main__":
    main(*sys.argv[1:5], *map(int, sys.argv[5:8]))
