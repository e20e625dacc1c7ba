"""Files that were changed a moment ago are compared at every read. Tests that count comparisons wait for the moment."""

from __future__ import annotations

import time
from pathlib import Path

from moec.runtime.storage.read_verifier import SETTLED_NS


def wait_until_settled(bundle: Path) -> None:
    """Return when the last change of any file of a folder is old enough to be told from another."""
    while time.time_ns() - max(path.stat().st_ctime_ns for path in bundle.iterdir()) <= 1.05 * SETTLED_NS:
        time.sleep(0.05)
