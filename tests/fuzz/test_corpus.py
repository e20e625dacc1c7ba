"""Every kept input again, and a few hundred random calls of the extension, always the same ones."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from moec.runtime import kernels
from tests.fuzz.kept_inputs import ARCHIVE, kept_inputs, mutator_of
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
MUTATIONS = 20 if os.environ.get("MOEC_FULL_GATES") != "1" else 2000
CALLS_S = 3 if os.environ.get("MOEC_FULL_GATES") != "1" else 300
pytestmark = pytest.mark.gate("G10")


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs(name: str) -> None:
    """Each as it is, and with changes to its JSON."""
    target, source = TARGETS[name], random.Random(7)
    mutate = mutator_of(lambda data, size: data[: source.randrange(len(data) + 1)])
    inputs = kept_inputs(name)
    assert len(inputs) > len(target.seeds())
    for data in inputs:
        target.target(data)
    for seed in target.seeds():
        target.target(seed)
        for number in range(MUTATIONS):
            target.target(mutate(seed, 1 << 16, number))


def test_the_archive_is_small() -> None:
    assert ARCHIVE.stat().st_size < 40_000


@pytest.mark.skipif("scalar" not in kernels.available(), reason="the kernel extension is not built")
def test_calls_of_the_extension_compute_or_are_refused(tmp_path: Path) -> None:
    note = tmp_path / "call"
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz.native", str(CALLS_S), "1", str(note)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CALLS_S + 300, check=False)
    called = note.read_text() if note.exists() else "none"
    assert done.returncode == 0, f"call {called}: {done.stdout[-2000:]} {done.stderr[-4000:]}"
    assert "'refused': 0" not in done.stdout and "'computed': 0" not in done.stdout
