"""Commands that run while calls fail, and their checks: no partial result, old files intact, the next run works.

Each scene lives in a folder of its own, which holds its input. Calls count on files below that folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

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
    """SHA-256 of every file below a folder, by its path there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
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
class UnpackScene:
    """`moec unpack`: the whole bundle stands under its name, or nothing does; the next run completes it."""

    folder: Path
    arguments: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.arguments = ["unpack", str(self.folder / PACKED), str(self.folder / OUTPUT)]
        self._whole = digests(self.folder / INPUT)

    def prepare(self) -> None:
        for path in self.folder.glob(f"{OUTPUT}*"):
            shutil.rmtree(path)

    def complaints(self, outcome: Outcome) -> list[str]:
        output = self.folder / OUTPUT
        if output.exists():
            return [] if digests(output) == self._whole else ["what stands under the name is not whole"]
        return ["nothing was unpacked"] if outcome.code == 0 else []

    def complaints_after(self, outcome: Outcome) -> list[str]:
        output = self.folder / OUTPUT
        if outcome.code not in (0, 1) or digests(output) != self._whole:
            return [f"the next run does not complete it: {outcome}"]
        left = sorted(path.name for path in self.folder.glob(f"{OUTPUT}*"))
        return [] if left == [OUTPUT] else [f"left behind: {left}"]


@dataclass
class PackScene:
    """`moec pack`: the whole archive stands under its name, or nothing does; the next run completes it."""

    folder: Path
    arguments: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.arguments = ["pack", str(self.folder / INPUT), str(self.folder / ARCHIVE)]
        self._whole = (self.folder / PACKED).read_bytes()

    def prepare(self) -> None:
        for path in self.folder.glob(f"{ARCHIVE}*"):
            path.unlink()

    def complaints(self, outcome: Outcome) -> list[str]:
        output = self.folder / ARCHIVE
        if output.exists():
            return [] if output.read_bytes() == self._whole else ["what stands under the name is not whole"]
        return ["nothing was packed"] if outcome.code == 0 else []

    def complaints_after(self, outcome: Outcome) -> list[str]:
        output = self.folder / ARCHIVE
        if outcome.code not in (0, 1) or not output.exists() or output.read_bytes() != self._whole:
            return [f"the next run does not complete it: {outcome}"]
        left = sorted(path.name for path in self.folder.glob(f"{ARCHIVE}*"))
        return [] if left == [ARCHIVE] else [f"left behind: {left}"]


@dataclass
class TuneScene:
    """`moec tune`: what an earlier one found stays until a new result is complete."""

    folder: Path
    arguments: list[str] = field(init=False)

    def __post_init__(self) -> None:
        few = [
            "--tokens",
            "2",
            "--expert-cache",
            "40%",
            "--threads",
            "1",
            "--set",
            "prefetch=off",
        ]  # 30 engines, else 90
        self.arguments = ["tune", str(self.folder / INPUT), *few]
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
    others = {"unpack": UnpackScene, "pack": PackScene, "tune": TuneScene, "compile": CompileScene, "pull": PullScene}
    return others[name](folder)
