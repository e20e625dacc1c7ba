"""Receipts: which files of a bundle were compared with their digests, so that they are not read again.

A file counts as unchanged if inode, size and time of the last change of its content are the same. That finds accidents.
It does not find a root user who sets the time back, and the disk is trusted.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from moec.manifests.bundle import MANIFEST_NAME
from moec.manifests.codec import DecodeError, canonical_json, decode_manifest, from_plain, to_plain
from moec.manifests.errors import BundleError
from moec.manifests.files.input_file import UnreadableFile, open_input, read_input
from moec.manifests.files.limits import MAX_MANIFEST_BYTES, JsonLimits
from moec.manifests.files.output_file import WRITING_SUFFIX, AtomicFile, FileSystem
from moec.manifests.files.strict_json import load_strict_json

from .places import Places

RECEIPT_VERSION = 1
RECEIPT_JSON = JsonLimits(8 << 20, containers=1 << 15, values=1 << 18, texts=1 << 18, depth=4)
NO_RECEIPT = "it has no receipt"
_PART_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """Identity of a file when it was compared with its digest."""

    name: str
    inode: int
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """Files of a bundle, `moec.json` included."""

    version: int
    manifest_sha256: str
    files: tuple[CheckedFile, ...]

    def __post_init__(self) -> None:
        if self.version != RECEIPT_VERSION:
            raise ValueError(f"version: expected {RECEIPT_VERSION}, found {self.version}")

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def make_receipt(folder: Path, manifest_sha256: str, names: Iterable[str]) -> Receipt:
    """Return the receipt of files that were just checked. Raises OSError."""
    return Receipt(RECEIPT_VERSION, manifest_sha256, tuple(file_identity(folder, name) for name in sorted(names)))


def write_receipt(path: Path, receipt: Receipt, system: FileSystem) -> None:
    with AtomicFile(path, path.with_name(f".{path.name}{WRITING_SUFFIX}"), system) as file:
        file.write(canonical_json(to_plain(receipt)))


def read_receipt(path: Path) -> Receipt | None:
    """Return a receipt; None if there is none, or if it cannot be used."""
    try:
        return from_plain(  # type: ignore[no-any-return]
            Receipt, load_strict_json(read_input(path, RECEIPT_JSON.size_bytes), RECEIPT_JSON)
        )
    except (UnreadableFile, DecodeError, ValueError):
        return None


def difference(folder: Path, receipt: Receipt | None) -> str | None:
    """Return what changed in a folder since its receipt, in words, or None if nothing did. No file is read."""
    if receipt is None:
        return NO_RECEIPT
    try:
        names = set(os.listdir(folder))
    except OSError as error:
        return f"it cannot be listed: {error.strerror}"
    stated = {file.name for file in receipt.files}
    if MANIFEST_NAME not in stated or names != stated:
        other = sorted((names ^ stated) or {MANIFEST_NAME})[0]
        return f"`{other}` was {'added' if other in names else 'removed'}"
    for file in receipt.files:
        if not is_unchanged(folder, file):
            return f"`{file.name}` was not checked since it was written"
    return None


def is_unchanged(folder: Path, file: CheckedFile) -> bool:
    try:
        return file_identity(folder, file.name) == file
    except OSError:
        return False


def file_identity(folder: Path, name: str) -> CheckedFile:
    """Return the identity of a regular file. Raises OSError."""
    status = os.lstat(folder / name)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"`{name}` is no regular file")
    return CheckedFile(name, status.st_ino, status.st_size, status.st_mtime_ns)


def recheck(places: Places, name: str, system: FileSystem | None) -> str | None:
    """Return what changed in a bundle since its receipt, in words, or None. Files with another identity are read.

    A folder that was copied, or restored from a backup, has other inodes. Its bytes are compared with the manifest that
    the receipt names.
    system: writes the renewed receipt; None: nothing is written.
    Raises OSError if the receipt cannot be written.
    """
    folder, receipt = places.bundle(name), read_receipt(places.receipt(name))
    change = difference(folder, receipt)
    if change is None or receipt is None:
        return change
    digests = _digests(places, name, receipt)
    files = tuple(_checked(places, name, file, digests.get(file.name)) for file in receipt.files)
    renewed = replace(receipt, files=files)
    if system is not None and renewed != receipt:
        write_receipt(places.receipt(name), renewed, system)
    changed = next((file.name for file in files if not is_unchanged(folder, file)), None)
    change = difference(folder, renewed)
    return change if changed is None or change is None else f"`{changed}` was changed"


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
        while block := os.read(descriptor, _PART_BYTES):
            digest.update(block)
    finally:
        os.close(descriptor)
    return digest.hexdigest()
