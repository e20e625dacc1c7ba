"""`load` has typed options: editors complete them, and a type checker finds a wrong one."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from moec.runtime.options.runtime import RuntimeOptions, RuntimeSettings

ROOT = Path(__file__).parents[3]
# `load` and what its signature names; mypy reads nothing else, so that it ends soon.
CHECKED = ("moec.runtime", "moec.runtime.engine.engine", "moec.runtime.options.runtime", "moec.runtime.options.lossy")
CALLS = """
from moec.runtime import load

load("x", memory="2GiB", threads=2, policy="lru", verify=False, kv="float16", lossy="expert-activations bfloat16")
load("x", memory=2 << 30)
load("x", memory=None)
load("x", memry="2GiB")
load("x", memory=1.5)
load("x", policy="fifo")
load("x", threads="2")
load("x").generate("", samplng=None)
"""


def test_keywords_are_the_fields() -> None:
    assert list(RuntimeSettings.__annotations__) == [field.name for field in fields(RuntimeOptions)]
    expected = {name: get_type_hints(RuntimeOptions)[name] for name in RuntimeSettings.__annotations__}
    assert get_type_hints(RuntimeSettings) == {**expected, "memory": str | int | None}


@pytest.mark.slow
@pytest.mark.in_ci
def test_a_type_checker_finds_wrong_options(tmp_path: Path) -> None:
    (tmp_path / "moec").mkdir()
    for package in ("manifests", "profiles", "runtime"):
        (tmp_path / "moec" / package).symlink_to(ROOT / package)
    (tmp_path / "calls.py").write_text(CALLS)
    modules = [word for name in (*CHECKED, "calls") for word in ("-m", name)]
    options = ["--python-version", "3.10", "--follow-imports", "skip", "--namespace-packages", "--no-site-packages"]
    command = [sys.executable, "-m", "mypy", *options, "--explicit-package-bases", *modules]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    faults = re.findall(r"^calls\.py:(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    lines = [CALLS.splitlines()[int(number) - 1] for number, _ in faults]
    assert lines == CALLS.splitlines()[6:], done.stdout + done.stderr
    assert 'did you mean "memory"' in faults[0][1]
