"""Commands of `moec` in one process, each with one call that fails. As a program, below the preloaded shim:

python -m tests.faults.driver SHIM SCENE FOLDER FAULT FIRST STEP LAST

It prints one JSON object per run: the number, the call that failed, the exit code and what is wrong. It ends after the
first run that made fewer calls than its number, or after LAST.

Each command is a scene in a folder of its own, which holds its input. Calls count on files below that folder. A scene
checks that there is no partial result, that old files are intact, and that the next run works.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import gc
import hashlib
import io
import json
import os
import shutil
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

READ, WRITE, SYNC, RENAME, OPEN, TRUNCATE, MAP, ALLOCATE = (1 << bit for bit in range(8))
ONCE, FROM_THEN_ON, SHORT = range(3)
ALLOWED_CODES = (0, 1, 3, 5, 75)
HANG_S = 120
INPUT, PACKED, OUTPUT, ARCHIVE = "bundle", "packed.moec", "out", "again.moec"
PROMPT = "two pens and a green lamp"


@dataclass(frozen=True)
class Outcome:
    """End of a command: exit code and output."""

    code: int
    out: str
    err: str


class Scene(Protocol):
    """A command and its conditions. arguments: of the console script."""

    arguments: list[str]

    def prepare(self) -> None:
        """Bring the folder back to what it was before the command."""

    def complaints(self, outcome: Outcome) -> list[str]:
        """Return the errors after a run in which a call failed."""

    def complaints_after(self, outcome: Outcome) -> list[str]:
        """Return the errors after one more run without faults, on the files of the first one."""


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, by its path there, or of one file."""
    files = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@dataclass
class RunScene:
    """`moec run`: the text is right, or there is none; the bundle stays as it is."""

    folder: Path
    options: list[str]
    arguments: list[str] = field(init=False)
    expected: str | None = None

    def __post_init__(self) -> None:
        asked = ["--prompt", PROMPT, "--max-new-tokens", "4", "--expert-cache", "40%", "--json"]
        self.arguments = ["run", str(self.folder / INPUT), *asked, *self.options]
        self._before = digests(self.folder / INPUT)

    def prepare(self) -> None:
        pass

    def _text(self, outcome: Outcome) -> str:
        return str(json.loads(outcome.out)["text"])

    def complaints(self, outcome: Outcome) -> list[str]:
        found = []
        if outcome.code == 0:
            text = self._text(outcome)
            self.expected = text if self.expected is None else self.expected
            if text != self.expected:
                found.append(f"another text: {text!r}, expected {self.expected!r}")
        if digests(self.folder / INPUT) != self._before:
            found.append("the bundle changed")
        return found

    def complaints_after(self, outcome: Outcome) -> list[str]:
        return self.complaints(outcome) if outcome.code == 0 else [f"the next run ends with {outcome}"]


@dataclass
class FilesScene:
    """`moec pack` or `moec unpack`: the whole result stands under its name, or nothing does; the next run completes it.

    name: of the command.
    """

    folder: Path
    name: str
    arguments: list[str] = field(init=False)

    def __post_init__(self) -> None:
        source, target, whole = (INPUT, ARCHIVE, PACKED) if self.name == "pack" else (PACKED, OUTPUT, INPUT)
        self._output = self.folder / target
        self.arguments = [self.name, str(self.folder / source), str(self._output)]
        self._whole = digests(self.folder / whole)

    def prepare(self) -> None:
        for path in self.folder.glob(f"{self._output.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def complaints(self, outcome: Outcome) -> list[str]:
        if self._output.exists():
            return [] if digests(self._output) == self._whole else ["what stands under the name is not whole"]
        return [f"{self.name} wrote nothing"] if outcome.code == 0 else []

    def complaints_after(self, outcome: Outcome) -> list[str]:
        if outcome.code not in (0, 1) or digests(self._output) != self._whole:
            return [f"the next run does not complete it: {outcome}"]
        left = sorted(path.name for path in self.folder.glob(f"{self._output.name}*"))
        return [] if left == [self._output.name] else [f"left behind: {left}"]


@dataclass
class TuneScene:
    """`moec tune`: what an earlier one found stays until a new result is complete."""

    folder: Path
    arguments: list[str] = field(init=False)

    def __post_init__(self) -> None:
        few = "--tokens 2 --expert-cache 40% --threads 1 --set prefetch=off"  # 30 engines, else 90
        self.arguments = ["tune", str(self.folder / INPUT), *few.split()]
        self._file = self.folder / f"{INPUT}.tune.json"
        self._before = b'{"format_version": 0, "of": "an older release"}\n'

    def prepare(self) -> None:
        for path in self.folder.glob(f"{INPUT}.*"):
            path.unlink()
        self._file.write_bytes(self._before)

    def complaints(self, outcome: Outcome) -> list[str]:
        from moec.runtime.tuning.tune_file import read_tuning

        if self._file.read_bytes() == self._before:
            return ["nothing was written"] if outcome.code == 0 else []
        try:
            read_tuning(self.folder / INPUT)
        except ValueError as error:
            return [f"half a result: {error}"]
        return []

    def complaints_after(self, outcome: Outcome) -> list[str]:
        if outcome.code != 0:
            return [f"the next run ends with {outcome}"]
        left = sorted(path.name for path in self.folder.glob(f"{INPUT}.*"))
        return [] if left == [self._file.name] else [f"left behind: {left}"]


@dataclass
class CompileScene:
    """`moec compile --overwrite`: the old bundle, the new one, or none with the old one next to it."""

    folder: Path
    arguments: list[str] = field(init=False)

    def __post_init__(self) -> None:
        named = ["--group-size", "32", "--device", "raspberry-pi-4b-sd", "--overwrite", "-o", str(self.folder / OUTPUT)]
        self.arguments = ["compile", str(self.folder / "model"), "--uniform", "4", *named]
        self._old = digests(self.folder / INPUT)
        self._new: dict[str, str] | None = None

    def prepare(self) -> None:
        for path in self.folder.glob(f"{OUTPUT}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(self.folder / INPUT, self.folder / OUTPUT)

    def complaints(self, outcome: Outcome) -> list[str]:
        output = self.folder / OUTPUT
        if not output.exists():
            aside = [path for path in self.folder.glob(f"{OUTPUT}.*") if digests(path) == self._old]
            return [] if aside and outcome.code else ["the old bundle is gone"]
        found = digests(output)
        if outcome.code == 0 and self._new is None:
            self._new = found
        return [] if found in (self._old, self._new) else ["what stands under the name is neither old nor new"]

    def complaints_after(self, outcome: Outcome) -> list[str]:
        if outcome.code != 0 or digests(self.folder / OUTPUT) != self._new:
            return [f"the next run ends with {outcome}, or in another bundle"]
        return []


@dataclass
class PullScene:
    """`moec pull` of a second bundle: the first one or the second is current, and whole; the next run completes it."""

    folder: Path
    arguments: list[str] = field(init=False)

    def __post_init__(self) -> None:
        from tests.shipping.devices import Device
        from tests.shipping.model_bundles import write_bundle

        for name in ("first", "second", "store"):  # of an earlier process of this sweep
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self._device = Device(self.folder / "device", self.folder / "store", check=lambda folder: None)
        first = write_bundle(self.folder / "first")
        second = write_bundle(
            self.folder / "second", version=lambda layer, expert: int(layer == 1 and expert != 2), note="2"
        )
        self._bundles, self._expected = [first, second], [digests(first), digests(second)]
        key = self._device.write_key(self.folder)
        self.arguments = ["pull", str(self.folder / "store"), str(self._device.folder), "--key", str(key)]

    def prepare(self) -> None:
        from tests.shipping.model_bundles import push
        from tests.shipping.signing_keys import signing_key

        shutil.rmtree(self._device.folder, ignore_errors=True)
        push(self._device.store, self._bundles[0], signing_key(), 1)
        self._device.pull()
        push(self._device.store, self._bundles[1], signing_key(), 2)

    def complaints(self, outcome: Outcome) -> list[str]:
        found = digests(self._device.folder / "current")
        if found not in self._expected or (outcome.code == 0 and found != self._expected[1]):
            return ["the current bundle is neither the first nor the second, or not the second after a success"]
        installed = [path for path in self._device.folder.iterdir() if len(path.name) == 16 and path.is_dir()]
        damaged = [path.name for path in installed if digests(path) not in self._expected]
        return [f"installed, but not whole: {damaged}"] if damaged else []

    def complaints_after(self, outcome: Outcome) -> list[str]:
        if outcome.code != 0 or digests(self._device.folder / "current") != self._expected[1]:
            return [f"the next run does not complete it: {outcome}"]
        left = [name for name in self._device.names if "partial" in name or "journal" in name or "writing" in name]
        return [f"left behind: {left}"] if left else []


def scene_of(name: str, folder: Path) -> Scene:
    """name: run-direct, run-buffered, run-mmap, run-numpy, unpack, pack, tune, compile or pull."""
    if name.startswith("run-"):
        way = name.removeprefix("run-")
        return RunScene(folder, ["--set", "kernels=numpy"] if way == "numpy" else ["--io", way, "--threads", "2"])
    if name in ("pack", "unpack"):
        return FilesScene(folder, name)
    return {"tune": TuneScene, "compile": CompileScene, "pull": PullScene}[name](folder)


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
