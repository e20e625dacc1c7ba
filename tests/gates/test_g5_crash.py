"""G5: a compile that fails or is killed at any disk operation leaves the old bundle, a complete one, or none.

After a resume it gives the bytes of an uninterrupted run. The sample takes the first, a middle and the last operation
of every stage. tests/compiler/workspace/test_durable.py tests every operation of the durable writes.

As a program, it kills a process at each named operation: see `run_killed`.
python -m tests.gates.test_g5_crash WAY FOLDER MODEL DATA OLD_BUNDLE N...
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from moec.compiler.request.plan import CompileResult
from moec.compiler.workspace.durable import Disk
from moec.manifests.errors import DiskFull
from tests.compiler.workspace.faulty_disk import MODES, FaultyDisk, PowerCut
from tests.tiny_compile import check_bundle, compile_tiny, contents, little_memory, names, save_model, save_texts

pytestmark = pytest.mark.gate("G5")
STAGES = ("journal", "emit", "manifest", "certify", "publish", "replace", "clean up")
OF_ALL_LAYERS = "temporary bundle"
"""Where memory holds the model, the certificate also runs the checkpoint, from a temporary bundle."""
OPERATIONS = (
    "open",
    "append",
    "write",
    "sync",
    "sync_file",
    "sync_directory",
    "rename",
    "make_directory",
    "remove_tree",
)
KILLED = 9
WAYS = ("all layers stay", "little memory")
"""All layers stay in memory, or none stays between passes."""
CERTIFICATE_FILES = ("quality.json", "README.md", "losses.svg", "bits.svg")


def compile_here(folder: Path, model: Path, data: Path, disk: Disk, **values: Any) -> CompileResult:
    """Run the compile that this gate interrupts: a search on data, over an existing bundle."""
    return compile_tiny(
        model, folder / "out", "kl", 0.05, data=str(data), disk=disk, bits=(3, 16), overwrite=True, **values
    )


class WatchedDisk(Disk):
    """A disk that records operation and path of every step.

    before: called with the number of each step, counted from 1.
    """

    def __init__(self, before: Callable[[int, str, Any], None] = lambda number, name, subject: None) -> None:
        self.steps: list[tuple[str, Path]] = []
        self._before = before

    def _note(self, name: str, subject: Any) -> None:
        path = Path(subject if isinstance(subject, Path) else subject.name)
        if name == "remove_tree" and not os.path.lexists(path):
            return
        self.steps.append((name, path))
        self._before(len(self.steps), name, subject)


def _watched(name: str) -> Callable[..., Any]:
    plain = getattr(Disk, name)

    def operation(self: WatchedDisk, subject: Any, *rest: Any) -> Any:
        self._note(name, subject)
        return plain(self, subject, *rest)

    return operation


for _name in OPERATIONS:
    setattr(WatchedDisk, _name, _watched(_name))


def kill_at(wanted: int) -> WatchedDisk:
    """Return a disk whose process ends at once at that operation. A write is cut in half."""

    def check(number: int, name: str, subject: Any) -> None:
        if number == wanted:
            if name == "write":
                subject.write(b"half of what was to come")
                subject.flush()
            os._exit(KILLED)

    return WatchedDisk(check)


def run_killed(folder: Path, model: Path, data: Path, old: Path, numbers: list[int]) -> None:
    """Run the killed processes. Each is a fork of this one, so imports are done once."""
    for number in numbers:
        place = folder / str(number)
        place.mkdir()
        shutil.copytree(old, place / "out")
        child = os.fork()
        if child == 0:
            compile_here(place, model, data, kill_at(number))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(number, os.waitstatus_to_exitcode(status), flush=True)


@dataclass(frozen=True)
class Scene:
    """A model, data, an old bundle, and the operations and bytes of an uninterrupted compile.

    way: one of WAYS.
    """

    way: str
    model: Path
    data: Path
    old: Path
    old_contents: dict[str, bytes]
    whole: dict[str, bytes]
    stages: dict[str, list[int]]


def stage_of(name: str, path: Path, is_renamed: bool) -> str:
    """Return the stage of an operation."""
    if ".work-" in str(path):
        return OF_ALL_LAYERS
    if ".work" in str(path):
        return "clean up" if name == "remove_tree" else "journal"
    if path.name.startswith("out.moec-replaced") or path.name == "out":
        return "replace"
    if is_renamed or (name in ("sync_file", "sync_directory") and ".partial" in str(path)):
        return "publish"
    if "moec.json" in path.name:
        return "manifest"
    return "certify" if path.name.startswith(CERTIFICATE_FILES) else "emit"


@pytest.fixture(scope="module", params=[WAYS[0], pytest.param(WAYS[1], marks=pytest.mark.slow)])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        if request.param != WAYS[0]:
            little_memory(patch.setattr)
        yield make_scene(request.param, tmp_path_factory.mktemp("crash"))
    torch.set_num_threads(threads)


def make_scene(way: str, root: Path) -> Scene:
    """Compile once without interruption, and record every operation."""
    model = save_model(root / "tiny", layers=1 if way == WAYS[0] else 2, experts=2)
    data = save_texts(root / "texts", train=3, validation=3, test=6)
    compile_tiny(model, root / "old", "uniform", 4)
    shutil.copytree(root / "old", root / "whole" / "out")
    disk = WatchedDisk()
    compile_here(root / "whole", model, data, disk)
    stages: dict[str, list[int]] = {stage: [] for stage in (*STAGES, *([OF_ALL_LAYERS] if way == WAYS[0] else []))}
    for number, (name, path) in enumerate(disk.steps, 1):
        stages[stage_of(name, path, name == "rename" and path.name == "out.partial")].append(number)
    assert all(stages.values()), "every stage touches the disk"
    assert names(root / "whole") == {"out"}
    return Scene(way, model, data, root / "old", contents(root / "old"), contents(root / "whole" / "out"), stages)


def sample(scene: Scene) -> list[int]:
    """Return the first, middle and last operation of every stage."""
    chosen = {numbers[at] for numbers in scene.stages.values() for at in (0, len(numbers) // 2, -1)}
    return sorted(chosen)


def check_state(folder: Path, scene: Scene, has_old: bool = True) -> str:
    """Check that the output is the old bundle, the new one or none. A missing old bundle must be next to it."""
    output = folder / "out"
    if not output.exists():
        assert not has_old or contents(folder / "out.moec-replaced") == scene.old_contents
        return "none"
    check_bundle(output)
    found = contents(output)
    assert found == scene.whole or (has_old and found == scene.old_contents)
    return "old" if found == scene.old_contents else "new"


def resume(folder: Path, scene: Scene) -> None:
    compile_here(folder, scene.model, scene.data, Disk(), resume=True)
    assert contents(folder / "out") == scene.whole
    assert names(folder) == {"out"}


@pytest.mark.parametrize("has_old", [True, False])
def test_a_disk_that_fails_or_loses_power(scene: Scene, tmp_path: Path, has_old: bool) -> None:
    states = []
    for at, number in enumerate(sample(scene)[:: 1 if has_old else 2]):
        folder = tmp_path / str(number)
        folder.mkdir()
        if has_old:
            shutil.copytree(scene.old, folder / "out")
        mode = MODES[(at + has_old) % len(MODES)]
        disk = FaultyDisk(tmp_path / f"attic-{number}", number, mode, seed=number)
        with contextlib.suppress(PowerCut if mode == "power cut" else DiskFull):
            compile_here(folder, scene.model, scene.data, disk)
        # Without an old bundle the run is a few operations shorter than that of the sample.
        assert disk.has_failed or not has_old
        states.append(check_state(folder, scene, has_old))
        # Each takes a compile, so only every other one is resumed.
        if at % 2 == 0 or (has_old and states[-1] == "none"):
            resume(folder, scene)
    assert {"old" if has_old else "none", "new"} <= set(states)


def test_a_process_that_is_killed(scene: Scene, tmp_path: Path) -> None:
    numbers = sorted({numbers[len(numbers) // 2] for numbers in scene.stages.values()} | {scene.stages["publish"][-1]})
    places = (tmp_path, scene.model, scene.data, scene.old)
    command = [sys.executable, "-m", "tests.gates.test_g5_crash", scene.way, *places]
    finished = subprocess.run(
        [*command, *map(str, numbers)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.stdout.splitlines() == [f"{number} {KILLED}" for number in numbers], finished.stderr
    states = {number: check_state(tmp_path / str(number), scene) for number in numbers}
    assert states[scene.stages["publish"][-1]] == "none", "killed between the two renames"
    for number in (scene.stages["journal"][len(scene.stages["journal"]) // 2], scene.stages["publish"][-1]):
        assert names(tmp_path / str(number)) > {"out.work"}
        resume(tmp_path / str(number), scene)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:
        if sys.argv[1] != WAYS[0]:
            little_memory(patched.setattr)
        run_killed(*map(Path, sys.argv[2:6]), [int(text) for text in sys.argv[6:]])
