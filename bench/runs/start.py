"""Start-up times.

    python -m bench.runs.start BUNDLE ... [--rounds N]

The figures are medians of fresh processes in turns. The Markdown table has these rows:

* A bare interpreter.
* `import moec.runtime`.
* `from moec.runtime import load`, which loads numpy and the extension.
* For each bundle `moec run` until its first token is written. The page cache holds the bundle. With `--cold`, as root,
  the page cache is empty.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from ..yardstick.limits import drop_caches

PROGRAMS = {
    "python": "pass",
    "import moec.runtime": "import moec.runtime",
    "from moec.runtime import load": "from moec.runtime import load",
}


def seconds(command: list[str]) -> float:
    """Return the seconds until a process writes or ends. Raises subprocess.CalledProcessError if it fails."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        elapsed = time.perf_counter() - started
        process.stdout.read()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return elapsed


def main() -> None:
    """Read the command line, run and print."""
    parser = argparse.ArgumentParser(description="Start-up times.")
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="empty the page cache before each run of a bundle")
    options = parser.parse_args()
    commands = {name: [sys.executable, "-c", program] for name, program in PROGRAMS.items()}
    for path in options.bundles:
        run = [sys.executable, "-m", "moec.cli.main", "run", str(path), "--prompt", "Once", "--max-new-tokens", "1"]
        commands[f"moec run {path.name}"] = run
    found: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            if options.cold and name not in PROGRAMS:
                drop_caches()
            found[name].append(seconds(command))
    print(f"{os.cpu_count()} processors, {options.rounds} rounds, {'cold' if options.cold else 'warm'}\n")
    print("| process | seconds (least to most) |\n|---|---|")
    for name, times in found.items():
        print(f"| {name} | {statistics.median(times):.3f} ({min(times):.3f} to {max(times):.3f}) |")


if __name__ == "__main__":
    main()
