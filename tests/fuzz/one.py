"""Fuzz one target until the time is over or an input fails.

As a program: python -m tests.fuzz.one TARGET SECONDS FOLDER
With 0 seconds: add those inputs of the folder to the kept ones that reach what no kept input reaches.
"""

from __future__ import annotations

import inspect
import resource
import shlex
import subprocess
import sys
import types
from pathlib import Path

import atheris

from tests.fuzz.kept_inputs import mutator_of, pack, unpack
from tests.fuzz.targets import LARGEST_BYTES, TARGETS, Target

MEMORY_BYTES = 2 << 30
INPUT_S = 10
WATCHED = ("moec", "json", "tomllib")
_AGAIN = "again"  # in place of the seconds: what follows is for libFuzzer


def instrument() -> int:
    """Watch the branches of every loaded function of moec, and of the parsers that it calls; return how many.

    atheris.instrument_imports would do it on import, but not for packages of an editable install.
    """
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in WATCHED]
    owners: list[object] = [*modules]
    for module in modules:
        owners += [found for found in vars(module).values() if isinstance(found, type)]
    found: dict[int, types.FunctionType] = {}
    for owner in owners:
        for value in vars(owner).values():
            inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
            plain = inspect.unwrap(inner) if callable(inner) else inner
            if isinstance(plain, types.FunctionType) and plain.__module__.partition(".")[0] in WATCHED:
                found[id(plain)] = plain
    for function in found.values():
        atheris.instrument_func(function)
    return len(found)


def start(target: Target, arguments: list[str]) -> None:
    """Hand over to libFuzzer, which ends the process."""
    print(f"{instrument()} functions are watched", flush=True)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # Asked for by name each time: Setup puts another function there.
    mutator = mutator_of(lambda data, size: bytes(atheris.Mutate(data, size)))
    atheris.Setup(arguments, target.target, custom_mutator=mutator)
    atheris.Fuzz()


def main(name: str, seconds: int, folder: Path) -> None:
    """folder: takes new inputs and, as crash-*, timeout-* or oom-*, those that fail."""
    new, kept = folder / "corpus", folder / "kept"
    new.mkdir(parents=True, exist_ok=True)
    unpack(name, kept)
    again = folder / "again.sh"  # a merge starts itself for every part of its work
    again.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tests.fuzz.one {name} {_AGAIN} "$@"\n')
    again.chmod(0o755)
    limits = [f"-timeout={INPUT_S}", f"-rss_limit_mb={MEMORY_BYTES >> 20}", f"-max_len={LARGEST_BYTES}"]
    limits.append(f"-artifact_prefix={folder}/")
    if seconds:
        way = [f"-max_total_time={seconds}", "-print_final_stats=1", *limits, str(new), str(kept)]
        start(TARGETS[name], [str(again), *way])
    subprocess.run([str(again), "-merge=1", *limits, str(kept), str(new)], check=True)
    pack(name, kept)


if __name__ == "__main__":
    if sys.argv[2] == _AGAIN:
        start(TARGETS[sys.argv[1]], [sys.argv[0], *sys.argv[3:]])
    else:
        main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]).resolve())
