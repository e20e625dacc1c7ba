"""Functions for the tests of all families: lower a checkpoint, and change its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moec.compiler.checkpoint.checkpoint import open_checkpoint
from moec.compiler.families import Lowering, lower


def lowered(path: Path) -> Lowering:
    """Return the lowering of the checkpoint in a folder."""
    return lower(open_checkpoint(str(path)))


def configured(path: Path, **changes: Any) -> Path:
    """Change keys of config.json. The value ... removes a key."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return path
