"""G10: every hostile input that once showed a defect, replayed through the command line.

Each command has 10 s of processor time and 2 GiB of address space. It ends with a documented exit code, and shows
neither a traceback nor a control character. Each new defect by hostile input adds a seed: see `tests/hostile/seed.py`.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import select
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tests.hostile
from tests.gates.damage import seal_files
from tests.hostile.bundle_writer import write_tiny_bundle
from tests.hostile.seed import Seed

pytestmark = pytest.mark.gate("G10")
EXIT_CODES = frozenset({0, 1, 2, 3, 130})
CPU_S, ADDRESS_BYTES, PATIENCE_S = 10, 2 << 30, 120
MOEC = Path(sys.executable).parent / "moec"
# Commands are forks of one process: imports take most of the time of a small command. Each has its own limits, and two
# processors, because the number of threads and their stacks must not depend on the machine.
_FORKS = f"""
import json, os, resource, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import numpy, tokenizers, moec.runtime.engine.engine
from moec.cli.main import main
for line in sys.stdin:
    arguments, home, environment = json.loads(line)
    child = os.fork()
    if child == 0:
        for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(os.open(os.path.join(home, name), os.O_RDWR), descriptor)
            setattr(sys, name, open(descriptor, "w" if descriptor else "r"))
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(home)
        resource.setrlimit(resource.RLIMIT_CPU, ({CPU_S}, {CPU_S}))
        resource.setrlimit(resource.RLIMIT_AS, ({ADDRESS_BYTES}, {ADDRESS_BYTES}))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["moec", *arguments]
        main()
        sys.exit()
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
# C0 without the line feed, DEL, C1, and characters that change the direction of text.
_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_UNFINISHED = re.compile(r"(^|/)\.|\.(partial|new|work|tmp)$")
FAULTS = ("Traceback", "panicked at", "this is a fault in moec")


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a command.

    code: exit code, negative for a signal, None after a timeout.
    before, after: name -> bytes of all files in the folder of the bundle and next to it.
    """

    code: int | None
    stdout: str
    stderr: str
    before: dict[str, int]
    after: dict[str, int]


class Console:
    """A process whose forks are the commands. It ends with the `with` block."""

    def __enter__(self) -> Console:
        command = [sys.executable, "-I", "-c", _FORKS]
        environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def replay(self, seed: Seed, bundle: Path, home: Path) -> Ending:
        """Change a new copy of the tiny bundle as the seed says, and run its command.

        home: home folder of the command.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        work = bundle.with_name("work")
        work.mkdir()
        if seed.change is not None:
            seed.change(bundle)
        if seed.seal:
            seal_files(bundle)
        before = _contents(bundle.parent)
        arguments = [part.replace("{bundle}", str(bundle)).replace("{work}", str(work)) for part in seed.arguments]
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8"}
        (home / "stdin").write_bytes(seed.standard_input)
        (home / "stdout").touch()
        (home / "stderr").touch()
        print(json.dumps([arguments, str(home), environment]), file=self.process.stdin, flush=True)
        child = int(self.process.stdout.readline())
        is_done = bool(select.select([self.process.stdout], [], [], PATIENCE_S)[0])
        if not is_done:
            os.kill(child, signal.SIGKILL)
        code = int(self.process.stdout.readline())
        texts = ((home / name).read_bytes().decode("utf-8", "backslashreplace") for name in ("stdout", "stderr"))
        return Ending(code if is_done else None, *texts, before, _contents(bundle.parent))


def _contents(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): os.lstat(path).st_size for path in sorted(folder.rglob("*")) if path.is_file()
    }


def problems(seed: Seed, ending: Ending) -> list[str]:
    """Return the faults of an ending; empty without a fault."""
    found = list[str]()
    if ending.code is None:
        found.append(f"still running after {PATIENCE_S} s")
    elif ending.code not in seed.exit_codes:
        found.append(f"exit code {ending.code}, expected {sorted(seed.exit_codes)}")
    found += [f"`{mark}` in stderr" for mark in FAULTS if mark in ending.stderr]
    shown = {"stderr": ending.stderr, **({"stdout": ending.stdout} if seed.arguments[0] == "inspect" else {})}
    for name, text in shown.items():
        if controls := _CONTROLS.findall(text):
            found.append(f"control characters in {name}: {sorted(set(controls))!a}")
    if lost := [name for name, size in ending.before.items() if ending.after.get(name) != size]:
        found.append(f"changed or lost: {lost}")
    new = [name for name in ending.after if name not in ending.before]
    wanted = [name for name in new if ending.code == 0 and name.startswith("work/") and not _UNFINISHED.search(name)]
    if left := sorted(set(new) - set(wanted)):
        found.append(f"left behind: {left}")
    return found


def all_seeds() -> dict[str, Seed]:
    """Return the seeds of all modules `seeds_*`, by module and name."""
    found = dict[str, Seed]()
    for module in pkgutil.iter_modules(tests.hostile.__path__):
        if module.name.startswith("seeds_"):
            seeds: tuple[Seed, ...] = importlib.import_module(f"tests.hostile.{module.name}").SEEDS
            names = Counter(seed.name for seed in seeds)
            assert seeds and max(names.values()) == 1, f"{module.name}: names are missing or not unique"
            found |= {f"{module.name.removeprefix('seeds_')}: {seed.name}": seed for seed in seeds}
    return found


SEEDS = all_seeds()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeds") / "bundle"
    write_tiny_bundle(folder)
    return folder


@pytest.fixture(scope="module")
def console() -> Iterator[Console]:
    with Console() as console:
        yield console


@pytest.mark.parametrize("name", SEEDS)
def test_a_seed(name: str, console: Console, original: Path, tmp_path: Path) -> None:
    seed, home = SEEDS[name], tmp_path / "home"
    assert seed.exit_codes and seed.exit_codes <= EXIT_CODES, "a seed must end with a documented exit code"
    home.mkdir()
    ending = console.replay(seed, Path(shutil.copytree(original, tmp_path / "place" / "bundle")), home)
    assert not (wrong := problems(seed, ending)), f"{wrong}\nstderr ends: {ending.stderr[-2000:]}"


HEALTHY = Seed("healthy", ("run", "{bundle}", "--prompt", "a b", "--max-new-tokens", "3"), frozenset({0}))


def test_the_tiny_bundle_itself_runs(console: Console, original: Path, tmp_path: Path) -> None:
    ending = console.replay(HEALTHY, Path(shutil.copytree(original, tmp_path / "place" / "bundle")), tmp_path)
    assert not problems(HEALTHY, ending), ending.stderr
    assert "3 after a prompt of 3" in ending.stderr and ending.stdout


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
def test_a_full_standard_output_of_the_console_script(original: Path) -> None:
    """The command prints a sentence and exits with 1."""
    with Path("/dev/full").open("wb") as full:
        child = subprocess.run(
            [MOEC, "run", original, "--prompt", "x", "--max-new-tokens", "2"],
            stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    said = child.stderr.decode()
    assert child.returncode == 1 and not [mark for mark in FAULTS if mark in said], said[-2000:]


GOOD = Ending(0, "text\n", "talk\n", {"bundle/moec.json": 9}, {"bundle/moec.json": 9, "work/out": 1})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"code": 70}, "exit code 70"),
        ({"code": -24}, "exit code -24"),
        ({"code": None}, "still running"),
        ({"stderr": "Traceback (most recent call last)"}, "`Traceback` in stderr"),
        ({"stderr": "thread panicked at src/lib.rs"}, "`panicked at` in stderr"),
        ({"stderr": "a\rb"}, "control characters in stderr"),
        ({"stderr": "a\x9bb"}, "control characters in stderr"),
        ({"after": {}}, "changed or lost"),
        ({"after": {**GOOD.before, "bundle.tune.json.new": 3}}, "left behind"),
        ({"after": {**GOOD.before, "work/out.partial": 3}}, "left behind"),
        ({"code": 3, "after": {**GOOD.before, "work/out": 3}}, "left behind"),
    ],
)
def test_the_gate_sees_what_is_wrong(changes: dict[str, object], said: str) -> None:
    fields = {name: getattr(GOOD, name) for name in Ending.__slots__}
    assert problems(HEALTHY, GOOD) == []
    assert any(said in problem for problem in problems(HEALTHY, Ending(**{**fields, **changes})))
    inspected = Seed("inspect", ("inspect", "{bundle}"), frozenset({0}))
    assert problems(inspected, Ending(**{**fields, "stdout": "a\x1b[0m"}))
    assert not problems(HEALTHY, Ending(**{**fields, "stdout": "a\x1b[0m"})), "a text may hold anything"
