"""`moec` as the benchmarks call it: a process of its own, JSON back."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def command_line(*arguments: object) -> list[str]:
    """The process of `moec ... --json`."""
    return [sys.executable, "-m", "moec.cli.main", *map(str, arguments), "--json"]


def moec(*arguments: object) -> dict[str, Any]:
    """What `moec ... --json` tells. Raises subprocess.CalledProcessError if it fails."""
    done = subprocess.run(command_line(*arguments), stdout=subprocess.PIPE, check=True, text=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told
