"""Time the shapes of published models next to llama.cpp, one after the other.

    python -m bench.shapes FOLDER --results RESULTS [--only NAME ...]

Each shape takes a bundle and a GGUF file of equal bytes, 9 to 40 GB together. They are removed before the next one.
llama.cpp's part needs the extra `bench` and an architecture in `gguf_file.py`. Conditions and arms are those of
`bench.yardstick.peers.compare`: all in memory, and control groups with 75, 50 and 25 % of the experts.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from .write import SHAPES, write

CONDITIONS = ("memory", "memory32", "cache-75", "cache-50", "cache-25")
ARMS = ("moec", "llama.cpp mmap 128 KiB", "llama.cpp repacked")


def time_shape(name: str, folder: Path, results: Path, rounds: int) -> None:
    """Write one shape, time it, and remove it."""
    place = folder / name
    write(name, place)
    can_write = find_spec("gguf") is not None and find_spec("llama_cpp") is not None
    if can_write:
        from .gguf_file import ARCHITECTURES
        from .gguf_file import write as write_gguf

        can_write = SHAPES[name]["model_type"] in ARCHITECTURES
    if can_write:
        write_gguf(place / "q4", place / "q4_0.gguf")
    else:
        print(f"{name}: llama.cpp is left out: it is not installed, or has no writer here", file=sys.stderr)
    arms = ARMS if can_write else ARMS[:1]
    command = [sys.executable, "-m", "bench.yardstick.peers.compare", str(place), "--results", str(results / name)]
    command += ["--rounds", str(rounds), "--only", *CONDITIONS, "--arms", *arms]
    subprocess.run(command, check=True)
    shutil.rmtree(place)


def main() -> None:
    """Read the command line and time the shapes."""
    parser = argparse.ArgumentParser(description="Time the shapes of published models next to llama.cpp.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=SHAPES, default=list(SHAPES), help="names of shapes")
    options = parser.parse_args()
    for name in options.only:
        time_shape(name, options.folder, options.results, options.rounds)


if __name__ == "__main__":
    main()
