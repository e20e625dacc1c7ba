"""Read files again whose identity is another than when they were checked, and renew the receipt.

A folder that was copied, or restored from a backup, has other inodes. Its bytes are compared with the manifest that the
receipt names.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace

from moec.manifests.bundle import MANIFEST_NAME
from moec.manifests.codec import decode_manifest
from moec.manifests.errors import BundleError
from moec.manifests.files.input_file import UnreadableFile, open_input, read_input
from moec.manifests.files.limits import MAX_MANIFEST_BYTES
from moec.manifests.files.output_file import FileSystem

from .places import Places
from .receipt import CheckedFile, Receipt, difference, file_identity, is_unchanged, read_receipt, write_receipt

_PART_BYTES = 1 << 20


def recheck(places: Places, name: str, system: FileSystem | None) -> str | None:
    """Return what changed in a bundle since its receipt, in words, or None. Files with another identity are read.

    system: writes the renewed receipt; None: nothing is written.
    Raises OSError if the receipt cannot be written.
    """
    folder, receipt = places.bundle(name), read_receipt(places.receipt(name))
    found = difference(folder, receipt)
    if found is None or receipt is None:
        return found
    digests = _digests(places, name, receipt)
    files = tuple(_checked(places, name, file, digests.get(file.name)) for file in receipt.files)
    renewed = replace(receipt, files=files)
    if system is not None and renewed != receipt:
        write_receipt(places.receipt(name), renewed, system)
    changed = next((file.name for file in files if not is_unchanged(folder, file)), None)
    found = difference(folder, renewed)
    return found if changed is None or found is None else f"`{changed}` was changed"


def _digests(places: Places, name: str, receipt: Receipt) -> dict[str, str]:
    """Return the digests of all files; none if `moec.json` is another one than that of the receipt."""
    place = places.bundle(name) / MANIFEST_NAME
    try:
        data = read_input(place, MAX_MANIFEST_BYTES)
        if hashlib.sha256(data).hexdigest() != receipt.manifest_sha256:
            return {}
        digests = {entry.name: entry.sha256 for entry in decode_manifest(data, str(place)).files}
    except (UnreadableFile, BundleError):
        return {}
    return {**digests, MANIFEST_NAME: receipt.manifest_sha256}


def _checked(places: Places, name: str, file: CheckedFile, sha256: str | None) -> CheckedFile:
    """Return a file with its present identity if it has the bytes that were checked, else as it was."""
    folder = places.bundle(name)
    if sha256 is None or is_unchanged(folder, file):
        return file
    try:
        before = file_identity(folder, file.name)
        is_equal = before.size_bytes == file.size_bytes and _digest(places, name, file.name) == sha256
        return before if is_equal and file_identity(folder, file.name) == before else file
    except (OSError, UnreadableFile):
        return file


def _digest(places: Places, name: str, file: str) -> str:
    """Return the SHA-256 of a file in hex. Raises OSError, UnreadableFile."""
    digest = hashlib.sha256()
    descriptor = open_input(places.bundle(name) / file)
    try:
        while part := os.read(descriptor, _PART_BYTES):
            digest.update(part)
    finally:
        os.close(descriptor)
    return digest.hexdigest()
