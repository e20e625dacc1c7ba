"""Calls of `moec` in a process of its own, with its JSON as result."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def command_line(*arguments: object) -> list[str]:
    """Return the command line of `moec ... --json`."""
    return [sys.executable, "-m", "moec.cli.main", *map(str, arguments), "--json"]


def moec(*arguments: object) -> dict[str, Any]:
    """Return the JSON of `moec ... --json`. Raises subprocess.CalledProcessError if it fails."""
    done = subprocess.run(command_line(*arguments), stdout=subprocess.PIPE, check=True, text=True)
    record: dict[str, Any] = json.loads(done.stdout)
    return record
