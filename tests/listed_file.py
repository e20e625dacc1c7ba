"""Add a file to a bundle, listed in its manifest."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from moec.manifests.bundle import MANIFEST_NAME, FileEntry
from moec.manifests.codec import encode_manifest
from moec.runtime.bundle.open_bundle import open_bundle


def add_listed(path: Path, name: str, content: bytes) -> Path:
    """Write a file into the bundle, list it with its digest, and return the folder."""
    with open_bundle(path) as bundle:
        manifest = bundle.manifest
    (path / name).write_bytes(content)
    entries = {entry.name: entry for entry in manifest.files}
    entries[name] = FileEntry(name, len(content), hashlib.sha256(content).hexdigest())
    files = tuple(entries[each] for each in sorted(entries))
    (path / MANIFEST_NAME).write_bytes(encode_manifest(replace(manifest, files=files)))
    return path
