"""The whole yardstick.

    python -m bench.yardstick FOLDER --results RESULTS

`make bench` runs it.

FOLDER (50 GB) holds:

* The checkpoint, the bundle at 4.5 bits per weight, and bundles at 2, 3 and 16 bits.
* The same weights for llama.cpp, and its fork built for this machine.
* The trained example.

Missing parts are made. The program writes routing figures of the yardstick and the example (`routing_*.json`). It
compares the engines, then moec with simpler versions of itself. It takes about two hours on two cores, as root. FOLDER
is kept for the next run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from .checkpoint.gguf_model import OLMOE, QWEN3MOE
from .checkpoint.routing import routing
from .checkpoint.write import text
from .peers.compare import FORK_GGUF
from .peers.fork import build

EXAMPLES = Path(__file__).parents[2] / "examples"
ROUTED_TOKENS = 500
BUNDLES = {
    "q4": "--uniform 4 --dense-bits 4 --group-size 32",
    "q3": "--uniform 3 --dense-bits 4 --group-size 64",
    "q2": "--uniform 2 --dense-bits 4 --group-size 64",
    "q16": "--uniform 16 --dense-bits 16",
}


def run(*command: str | Path) -> None:
    """Print a command and run it."""
    print("$", *command, file=sys.stderr, flush=True)
    subprocess.run([str(word) for word in command], check=True)


def example_text() -> str:
    """Return held-out problems with their answers, in the form that the example was trained on."""
    lines = (EXAMPLES / "data" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    items = [json.loads(line) for line in lines[:ROUTED_TOKENS]]
    return "\n".join(f"Question: {item['question']}\nAnswer: {item['answer']}" for item in items)


def write_routing(bundle: Path, text: str, path: Path) -> None:
    """Write the routing figures of a bundle on a text as JSON, and print them."""
    routes = json.dumps(routing(bundle, text, ROUTED_TOKENS))
    path.write_text(routes + "\n", encoding="utf-8")
    print(path.name, routes, flush=True)


def main() -> None:
    """Read the command line and run all steps. A step whose result exists is skipped."""
    parser = argparse.ArgumentParser(description="The yardstick, from nothing to a table.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    folder, python = options.folder, sys.executable
    checkpoint = folder / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    options.results.mkdir(parents=True, exist_ok=True)
    if not (checkpoint / "tokenizer.json").exists():  # written last
        run(python, "-m", f"{__package__}.checkpoint.write", checkpoint)
    for name, formats in BUNDLES.items():
        if not (folder / name).exists():
            run(python, "-m", "moec.cli.main", "compile", checkpoint, *formats.split(), "-o", folder / name)
    for name, architecture in (("q4_0.gguf", OLMOE), (FORK_GGUF, QWEN3MOE)):
        partial = (folder / name).with_suffix(".part")
        if not (folder / name).exists():
            run(
                python,
                "-m",
                f"{__package__}.checkpoint.gguf_model",
                checkpoint,
                partial,
                "--architecture",
                architecture,
            )
            partial.rename(folder / name)
    try:
        build(folder)
    except (subprocess.CalledProcessError, OSError) as error:  # no compiler, no cmake, no sources
        print(f"ik_llama.cpp is not built: {error}", file=sys.stderr)
    if not (folder / "example").exists():
        run(python, "-m", "moec.cli.main", "compile", EXAMPLES / "model", "--uniform", "8", "-o", folder / "example")
    write_routing(folder / "q4", text(), options.results / "routing_yardstick.json")
    write_routing(folder / "example", example_text(), options.results / "routing_example.json")
    run(python, "-m", f"{__package__}.peers.compare", folder, "--results", options.results)
    run(python, "-m", f"{__package__}.baselines.own_arms", folder, "--results", options.results)


if __name__ == "__main__":
    main()
