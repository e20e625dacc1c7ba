"""Find a model: a local folder, a folder at an fsspec URL, or a model on the hub. This module needs no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from moec.manifests.errors import CheckpointError

from .url import fetch, is_url, url_name

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def locate(path: str, patterns: tuple[str, ...], cache: Path | None = None) -> tuple[Path, str]:
    """Return a folder with the files of a model, and the model's name.

    patterns: names of the files that are copied from a URL or a hub.
    cache: parent of the folders for URLs; None: that of whole models.
    Raises CheckpointError.
    """
    if is_url(path):
        return fetch(path, patterns, cache), url_name(path)
    root = Path(path).expanduser()
    try:
        is_folder, exists = root.is_dir(), root.exists()
    except OSError as error:  # a name that is too long
        raise CheckpointError(f"cannot open `{path[:80]}`: {error.strerror or error}", "check the path") from error
    if is_folder:
        # A name that is not UTF-8 has no place in a manifest.
        return root, os.fsencode(root.resolve().name).decode("utf-8", "replace") or "model"
    if exists:
        raise CheckpointError(f"`{path}` is a file, expected a model folder", "name the folder that holds config.json")
    if _HUB_ID.fullmatch(path) and not root.parent.is_dir():
        return _download(path, patterns), path.rpartition("/")[2]
    raise CheckpointError(f"no folder `{path}`, expected a Hugging Face model folder", "check the path")


def _download(hub_id: str, patterns: tuple[str, ...]) -> Path:
    """Fetch a hub snapshot. Raises CheckpointError if that fails."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        remedy = "install `huggingface_hub`, or download the model and name its folder"
        raise CheckpointError(f"`{hub_id}` lies on the hub, and the hub's client is not installed", remedy) from error
    # The hub client has changed its HTTP library twice. The library's base error is a base of the hub's own error.
    transport_errors: Any = HfHubHTTPError.__bases__
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except (OSError, HFValidationError, *transport_errors) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"no folder `{hub_id}` here, and the hub gave no model of that name: {reason}",
            "check the path, or download the model and name its folder",
        ) from error
