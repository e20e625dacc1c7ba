"""Fuzz one target until the time is over or an input fails. As a program: python -m tests.fuzz.one TARGET SECONDS FOLDER"""

from __future__ import annotations

import inspect
import resource
import sys
import types
from pathlib import Path

import atheris

from tests.fuzz.mutator import mutator_of
from tests.fuzz.targets import LARGEST_BYTES, load_target

MEMORY_BYTES = 2 << 30
INPUT_S = 10
WATCHED = ("moec", "json", "tomllib")
CORPUS = Path(__file__).with_name("corpus")


def instrument() -> int:
    """Watch the branches of every loaded function of moec, and of the parsers that it calls; return how many.

    atheris.instrument_imports would do it on import, but not for packages of an editable install.
    """
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in WATCHED]
    owners = {id(module): module for module in modules}
    for module in modules:
        owners |= {id(found): found for found in vars(module).values() if isinstance(found, type)}
    found: dict[int, types.FunctionType] = {}
    for owner in owners.values():
        for value in vars(owner).values():
            plain = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)) or value)
            if isinstance(plain, types.FunctionType) and plain.__module__.partition(".")[0] in WATCHED:
                found[id(plain)] = plain
    for function in found.values():
        atheris.instrument_func(function)
    return len(found)


def main(name: str, seconds: int, folder: Path) -> None:
    """folder: takes new inputs and, as crash-*, timeout-* or oom-*, those that fail."""
    target = load_target(name)
    print(f"{instrument()} functions are watched", flush=True)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    folder.mkdir(parents=True, exist_ok=True)
    found = folder / "corpus"
    found.mkdir(exist_ok=True)
    limits = [f"-max_total_time={seconds}", f"-timeout={INPUT_S}", f"-rss_limit_mb={MEMORY_BYTES >> 20}"]
    places = [f"-artifact_prefix={folder}/", str(found), str(CORPUS / name)]
    arguments = [sys.argv[0], *limits, f"-max_len={LARGEST_BYTES}", "-print_final_stats=1", "-seed=1", *places]
    # Asked for by name each time: Setup puts another function there.
    mutator = mutator_of(lambda data, size: bytes(atheris.Mutate(data, size)))
    atheris.Setup(arguments, target.target, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
