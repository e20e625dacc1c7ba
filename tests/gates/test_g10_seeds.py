"""G10: every hostile input that once showed a defect, replayed through the command line.

Each command has 10 s of processor time and 2 GiB of address space. It ends with a documented exit code, and shows
neither a traceback nor a control character. Each new defect by hostile input adds a seed: see `tests/hostile/seed.py`.
"""

from __future__ import annotations

import importlib
import pkgutil
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.hostile
from tests.hostile.console import EXIT_CODES, FAULTS, MOEC, PATIENCE_S, Console, Ending, problems
from tests.hostile.seed import Seed
from tests.hostile.tiny_bundle import write_tiny_bundle

pytestmark = pytest.mark.gate("G10")


def all_seeds() -> dict[str, Seed]:
    """Return the seeds of all modules `seeds_*`, by module and name."""
    found = dict[str, Seed]()
    for module in pkgutil.iter_modules(tests.hostile.__path__):
        if module.name.startswith("seeds_"):
            seeds: tuple[Seed, ...] = importlib.import_module(f"tests.hostile.{module.name}").SEEDS
            names = Counter(seed.name for seed in seeds)
            assert seeds and max(names.values()) == 1, f"{module.name}: names are missing or not unique"
            found |= {f"{module.name.removeprefix('seeds_')}: {seed.name}": seed for seed in seeds}
    return found


SEEDS = all_seeds()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeds") / "bundle"
    write_tiny_bundle(folder)
    return folder


@pytest.fixture(scope="module")
def console() -> Iterator[Console]:
    with Console() as console:
        yield console


@pytest.mark.parametrize("name", SEEDS)
def test_a_seed(name: str, console: Console, original: Path, tmp_path: Path) -> None:
    seed, home = SEEDS[name], tmp_path / "home"
    assert seed.exit_codes and seed.exit_codes <= EXIT_CODES, "a seed must end with a documented exit code"
    home.mkdir()
    ending = console.replay(seed, Path(shutil.copytree(original, tmp_path / "place" / "bundle")), home)
    assert not (wrong := problems(seed, ending)), f"{wrong}\nstderr ends: {ending.stderr[-2000:]}"


HEALTHY = Seed("healthy", ("run", "{bundle}", "--prompt", "a b", "--max-new-tokens", "3"), frozenset({0}))


def test_the_tiny_bundle_itself_runs(console: Console, original: Path, tmp_path: Path) -> None:
    ending = console.replay(HEALTHY, Path(shutil.copytree(original, tmp_path / "place" / "bundle")), tmp_path)
    assert not problems(HEALTHY, ending), ending.stderr
    assert "3 after a prompt of 3" in ending.stderr and ending.stdout


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
def test_a_full_standard_output_of_the_console_script(original: Path) -> None:
    """The command prints a sentence and exits with 1."""
    with Path("/dev/full").open("wb") as full:
        child = subprocess.run(
            [MOEC, "run", original, "--prompt", "x", "--max-new-tokens", "2"],
            stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    said = child.stderr.decode()
    assert child.returncode == 1 and not [mark for mark in FAULTS if mark in said], said[-2000:]


GOOD = Ending(0, "text\n", "talk\n", {"bundle/moec.json": 9}, {"bundle/moec.json": 9, "work/out": 1})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"code": 70}, "exit code 70"),
        ({"code": -24}, "exit code -24"),
        ({"code": None}, "still running"),
        ({"stderr": "Traceback (most recent call last)"}, "`Traceback` in stderr"),
        ({"stderr": "thread panicked at src/lib.rs"}, "`panicked at` in stderr"),
        ({"stderr": "a\rb"}, "control characters in stderr"),
        ({"stderr": "a\x9bb"}, "control characters in stderr"),
        ({"after": {}}, "changed or lost"),
        ({"after": {**GOOD.before, "bundle.tune.json.new": 3}}, "left behind"),
        ({"after": {**GOOD.before, "work/out.partial": 3}}, "left behind"),
        ({"code": 3, "after": {**GOOD.before, "work/out": 3}}, "left behind"),
    ],
)
def test_the_gate_sees_what_is_wrong(changes: dict[str, object], said: str) -> None:
    fields = {name: getattr(GOOD, name) for name in Ending.__slots__}
    assert problems(HEALTHY, GOOD) == []
    assert any(said in problem for problem in problems(HEALTHY, Ending(**{**fields, **changes})))
    inspected = Seed("inspect", ("inspect", "{bundle}"), frozenset({0}))
    assert problems(inspected, Ending(**{**fields, "stdout": "a\x1b[0m"}))
    assert not problems(HEALTHY, Ending(**{**fields, "stdout": "a\x1b[0m"})), "a text may hold anything"
