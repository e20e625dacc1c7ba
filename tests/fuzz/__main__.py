"""Coverage-guided fuzzing of the parsers, then random calls of the extension; one child process after the other.

python -m tests.fuzz --seconds 60 [--target NAME] [--folder build/fuzz]
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
MEMORY_BYTES = 2 << 30
NATIVE = "native"


def fuzz(name: str, seconds: int, folder: Path) -> bool:
    """Fuzz one target; whether every input passed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.one", name, str(seconds), str(folder)]
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
    lines = (folder / "log").read_text(errors="replace").splitlines()
    executed = next((line.split()[-1] for line in lines if "number_of_executed_units" in line), "?")
    covered = next((line for line in reversed(lines) if " cov: " in line), "").partition(" cov: ")[2].split(" ")[0]
    failing = sorted(path.name for prefix in ("crash", "timeout", "oom") for path in folder.glob(f"{prefix}-*"))
    state = "ok" if done.returncode == 0 else f"FAILED, see {folder}/log and {', '.join(failing)}"
    print(f"{name:>10}: {executed} inputs, {covered or '?'} edges, {state}", flush=True)
    return done.returncode == 0


def limit_memory() -> None:
    """In a child, before it starts: 2 GiB of addresses."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def call_extension(seconds: int, folder: Path) -> bool:
    """Random calls of the extension; whether each computed or was refused."""
    folder.mkdir(parents=True, exist_ok=True)
    note, seed = folder / "call", time.time_ns() % 1_000_000
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz.native", str(seconds), str(seed), str(note)]
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False, preexec_fn=limit_memory
        )
    last = (folder / "log").read_text(errors="replace").strip().rpartition("\n")[2]
    again = f"again with: python -m tests.fuzz.native 1 SEED NOTE NUMBER, of {note}; see {folder}/log"
    print(f"{NATIVE:>10}: {last}, ok" if done.returncode == 0 else f"{NATIVE:>10}: FAILED, {again}", flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument(
        "--target", choices=(*TARGETS, NATIVE), action="append", help="leave it out for all; may be repeated"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fuzz")
    asked = parser.parse_args()
    names = asked.target or (*TARGETS, NATIVE)
    if importlib.util.find_spec("atheris") is None and names != [NATIVE]:
        print("error: atheris is not installed\nhint: run `make fuzz`; it exists for Linux on x86-64", file=sys.stderr)
        return 1
    results = [
        (call_extension if name == NATIVE else partial(fuzz, name))(asked.seconds, asked.folder / name)
        for name in names
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
