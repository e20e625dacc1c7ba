"""Replay a seed through the command line, in a child process with limits, and list the faults of its end."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.gates.damage import seal_files
from tests.hostile.seed import Seed

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
