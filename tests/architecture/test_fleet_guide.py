"""The guide to a fleet is one run: its commands succeed in their order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "from-checkpoint-to-fleet.md"
BLOCK = re.compile(r"^```\n(\$ .*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)$", re.MULTILINE)


@pytest.mark.slow
def test_the_commands_of_the_guide_succeed_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    blocks = [block for block in BLOCK.findall(GUIDE.read_text(encoding="utf-8")) if "\nerror: " not in block]
    shown = [command for block in blocks for command in COMMAND.findall(block.replace("\\\n", " "))]
    for command in shown:
        words = ["bash", "-c", f"exec 2>&1; {command}"]
        run = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, f"{command}\n{run.stdout}"
    assert len(shown) >= 14
