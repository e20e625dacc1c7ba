"""`moec serve`: the name of the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Invoke

EXAMPLE = Path(__file__).parents[2] / "examples" / "bundle"


@pytest.mark.parametrize("name", ["", "a\nb", "a\x1b[31m", "x" * 201])
def test_a_name_that_no_line_can_have_is_refused(invoke: Invoke, name: str) -> None:
    result = invoke("serve", EXAMPLE, "--name", name)
    assert result.exit_code == 1 and "`--name` must have 1 to 200 visible characters" in result.stderr


def test_an_installed_bundle_has_its_own_name(tmp_path: Path) -> None:
    """`current` is a link to a folder whose name changes with each update."""
    link = tmp_path / "current"
    link.symlink_to(EXAMPLE)
    command = [sys.executable, "-m", "moec.cli.main", "serve", str(link), "--port", "0", "--slots", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = [process.stderr.readline() for _ in range(2)]
        process.kill()
    assert said[1].startswith("serving `model` at ") and said[1].endswith("1 answer at once\n"), said
