"""The whole yardstick: ``python -m yardstick FOLDER --results RESULTS``, which `make bench` runs.

Makes what is missing in FOLDER (50 GB): the checkpoint, the bundle at 4.5 bits per weight, the same weights for
llama.cpp, its fork built for this machine, bundles at 2, 3 and 16 bits, the trained example. Writes how the yardstick
and the example route (`routing_*.json`), compares the engines, then this one with its simpler selves. About two hours
on two cores, as root; FOLDER is kept for the next run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from yardstick.checkpoint import text
from yardstick.compare import FORK_GGUF
from yardstick.fork import build
from yardstick.gguf_model import OLMOE, QWEN3MOE
from yardstick.routing import routing

EXAMPLES = Path(__file__).parents[2] / "examples"
ROUTED_TOKENS = 500
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


def example_text() -> str:
    """Held-out problems with their answers, as the example was trained on them."""
    lines = (EXAMPLES / "data" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    items = [json.loads(line) for line in lines[:ROUTED_TOKENS]]
    return "\n".join(f"Question: {item['question']}\nAnswer: {item['answer']}" for item in items)


def write_routing(bundle: Path, text: str, path: Path) -> None:
    """How a bundle routes a text, as JSON, and to the terminal."""
    told = json.dumps(routing(bundle, text, ROUTED_TOKENS))
    path.write_text(told + "\n", encoding="utf-8")
    print(path.name, told, flush=True)


def main() -> None:
    """Read the command line; each step is left out if its result is there."""
    parser = argparse.ArgumentParser(description="The yardstick, from nothing to a table.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    folder, python = options.folder, sys.executable
    checkpoint = folder / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    options.results.mkdir(parents=True, exist_ok=True)
    if not (checkpoint / "tokenizer.json").exists():  # written last
        run(python, "-m", "yardstick.checkpoint", checkpoint)
    for name, formats in BUNDLES.items():
        if not (folder / name).exists():
            run(python, "-m", "moec.cli.main", "compile", checkpoint, *formats.split(), "-o", folder / name)
    for name, architecture in (("q4_0.gguf", OLMOE), (FORK_GGUF, QWEN3MOE)):
        part = (folder / name).with_suffix(".part")
        if not (folder / name).exists():
            run(python, "-m", "yardstick.gguf_model", checkpoint, part, "--architecture", architecture)
            part.rename(folder / name)
    try:
        build(folder)
    except (subprocess.CalledProcessError, OSError) as error:  # no compiler, no cmake, no sources
        print(f"ik_llama.cpp is not built: {error}", file=sys.stderr)
    if not (folder / "example").exists():
        run(python, "-m", "moec.cli.main", "compile", EXAMPLES / "model", "--uniform", "8", "-o", folder / "example")
    write_routing(folder / "q4", text(), options.results / "routing_yardstick.json")
    write_routing(folder / "example", example_text(), options.results / "routing_example.json")
    run(python, "-m", "yardstick.compare", folder, "--results", options.results)
    run(python, "-m", "yardstick.own_arms", folder, "--results", options.results)


if __name__ == "__main__":
    main()
