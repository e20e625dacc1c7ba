"""A checkpoint's folder lowered, and its config.json changed: what the tests of all families begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moec.compiler.checkpoint.checkpoint import open_checkpoint
from moec.compiler.families import Lowering, lower


def lowered(path: Path) -> Lowering:
    """The checkpoint in a folder, translated."""
    return lower(open_checkpoint(str(path)))


def configured(path: Path, **changes: Any) -> Path:
    """Change keys of config.json; ... removes a key."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return path
