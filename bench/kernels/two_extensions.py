"""Speed of the kernels in two builds of the extension, for example by two compilers.

    python -m bench.kernels.two_extensions FIRST.so SECOND.so --kernels avx2 [--rounds 6] [--json]

Each round measures both in new processes, one after the other, in changing order. A figure is the best of all rounds,
in GFLOP/s of one thread. The quotient is that of the second over the first.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path

from bench.kernels import speed
from moec.runtime import kernels
from moec.runtime.kernels import extension

FORMATS = ("q1.6g128s", "q2g64b", "q3g64b", "q4g32s", "q6g64", "q8g64", "bf16")
ROWS, COLUMNS = 1024, 2048


def use_extension(library: Path) -> None:
    """Let this process compute with another build."""
    spec = importlib.util.spec_from_file_location("_native", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    extension.state.extension, extension.state.is_loaded = module, True


def measure(library: Path, name: str) -> dict[str, float]:
    """Return GFLOP/s of each case with the kernels of a name."""
    use_extension(library)
    kernels.select(name)
    kernels.set_threads(1)
    results = [speed.measure_linear(text, ROWS, COLUMNS, tokens, 1) for text in FORMATS for tokens in (1, 16, 96)]
    results += [speed.measure_expert("q4g32s", ROWS, COLUMNS, tokens, 1) for tokens in (1, 16)]
    results += [speed.measure_experts_from_memory("q4g32s", ROWS, COLUMNS, 1, 1), speed.measure_attention(1024, 1)]
    return {f"{result.operation} {result.format}, {result.tokens} tokens": result.gflop_per_s for result in results}


def in_turns(libraries: tuple[Path, Path], name: str, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the best figures of both builds."""
    best: dict[Path, dict[str, float]] = {library: {} for library in libraries}
    for number in range(rounds):
        for library in libraries if number % 2 == 0 else libraries[::-1]:
            command = [sys.executable, "-m", "bench.kernels.two_extensions", str(library), "--kernels", name]
            rates = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            best[library] = {case: max(value, best[library].get(case, 0.0)) for case, value in rates.items()}
    return best[libraries[0]], best[libraries[1]]


def main() -> None:
    """Read the command line and print a table, or one JSON object. One extension alone prints its figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("extension", nargs="+", type=Path)
    parser.add_argument("--kernels", required=True)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if len(options.extension) == 1:
        print(json.dumps(measure(options.extension[0], options.kernels)))
        return
    first, second = in_turns(tuple(options.extension), options.kernels, options.rounds)
    if options.json:
        print(json.dumps({"kernels": options.kernels, "first": first, "second": second}))
        return
    quotients = {case: second[case] / value for case, value in first.items()}
    for case, quotient in quotients.items():
        print(f"{case:34} {first[case]:8.1f} {second[case]:8.1f}  {quotient:.3f}")
    print(f"geometric mean of the quotients: {statistics.geometric_mean(quotients.values()):.3f}")


if __name__ == "__main__":
    main()
