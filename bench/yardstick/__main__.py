"""The whole yardstick: ``python -m yardstick FOLDER --results RESULTS``, which `make bench` runs.

Makes what is missing in FOLDER (45 GB): the checkpoint, the bundle at 4.5 bits per weight, the same weights for
llama.cpp, bundles at 2, 3 and 16 bits; then compares the two engines, then this one with its simpler selves, and prints
how the bundle routes. About an hour and a half on two cores, as root.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

BUNDLES = {
    "q4": "--uniform 4 --dense-bits 4 --group-size 32",
    "q3": "--uniform 3 --dense-bits 4 --group-size 64",
    "q2": "--uniform 2 --dense-bits 4 --group-size 64",
    "q16": "--uniform 16 --dense-bits 16",
}


def run(*command: str | Path) -> None:
    """Run a step and say so."""
    print("$", *command, file=sys.stderr, flush=True)
    subprocess.run([str(part) for part in command], check=True)


def main() -> None:
    """Read the command line; each step is left out if its result is there."""
    parser = argparse.ArgumentParser(description="The yardstick, from nothing to a table.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    folder, python = options.folder, sys.executable
    checkpoint, bundle, gguf = folder / "checkpoint", folder / "q4", folder / "q4_0.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    if not (checkpoint / "tokenizer.json").exists():  # written last
        run(python, "-m", "yardstick.checkpoint", checkpoint)
    for name, formats in BUNDLES.items():
        if not (folder / name).exists():
            run(python, "-m", "moec.cli.main", "compile", checkpoint, *formats.split(), "-o", folder / name)
    if not gguf.exists():
        part = gguf.with_suffix(".part")
        run(python, "-m", "yardstick.gguf_model", checkpoint, part)
        part.rename(gguf)
    run(python, "-m", "yardstick.compare", folder, "--results", options.results)
    run(python, "-m", "yardstick.own_arms", folder, "--results", options.results)
    run(python, "-m", "yardstick.routing", bundle, folder / "text.txt")


if __name__ == "__main__":
    main()
