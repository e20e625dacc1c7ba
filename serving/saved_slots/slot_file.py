"""One file with the keys and values of a text: written at once, and checked when it is read.

The layout, in the byte order of the machine: a fixed head, the token ids (int32), then the arrays of
`KVCache.prefix_parts`. The head has a mark, the identity of bundle and options, the number of tokens, and the SHA-256
of all that follows it. So the length of a file is known from its number of tokens.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import numpy as np

from moec.manifests.files.input_file import UnreadableFile, open_input
from moec.manifests.files.output_file import AtomicFile, FileSystem

_MARK = b"moec-kv1"
_HEAD = struct.Struct("=8s32sQ32s")
SUFFIX, UNFINISHED_SUFFIX = ".kv", ".kv.partial"
"""File names are the first 32 digits of the digest of the tokens, and this."""


class DamagedSlot(Exception):
    """A file that is no sound slot of this bundle. The message follows its name."""


def name_of(tokens: Sequence[int]) -> str:
    """Return the name of the file of a text."""
    return hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:32] + SUFFIX


def file_bytes(tokens: int, token_bytes: int) -> int:
    """Return the length of a file. token_bytes: bytes of the keys and values of one token."""
    return _HEAD.size + tokens * (4 + token_bytes)


def write_slot(path: Path, identity: bytes, tokens: Sequence[int], parts: Sequence[np.ndarray]) -> None:
    """Write a file, whole or not at all. Raises OSError."""
    ids = np.asarray(tokens, np.int32)
    digest = hashlib.sha256(ids.tobytes())
    for part in parts:
        digest.update(part.data)
    with AtomicFile(path, path.with_name(path.stem + UNFINISHED_SUFFIX), _PrivateFiles()) as file:
        file.write(_HEAD.pack(_MARK, identity, len(ids), digest.digest()))
        file.write(ids.tobytes())
        for part in parts:
            file.write(part.data.cast("B"))


class _PrivateFiles(FileSystem):
    """Files that other users cannot read."""

    def open(self, path: Path) -> BinaryIO:
        """Open a new file for its owner alone. Raises OSError."""
        file = super().open(path)
        os.fchmod(file.fileno(), 0o600)
        return file


def read_tokens(path: Path, identity: bytes, most: int, token_bytes: int) -> list[int]:
    """Return the token ids of a file, after a check of its head and length. Its content is not checked yet.

    most: most tokens, the context of the run.
    Raises DamagedSlot.
    """
    with _opened(path) as file:
        return _read_head(file, identity, most, token_bytes)[0]


def read_slot(path: Path, identity: bytes, tokens: Sequence[int], parts: Sequence[np.ndarray]) -> None:
    """Fill arrays with the content of a file. Raises DamagedSlot; the arrays then hold anything.

    tokens: token ids that the file must have.
    """
    token_bytes = sum(part.nbytes for part in parts) // len(tokens)
    with _opened(path) as file:
        ids, digest = _read_head(file, identity, len(tokens), token_bytes)
        if not np.array_equal(ids, tokens):
            raise DamagedSlot("has changed")
        actual = hashlib.sha256(np.asarray(ids, np.int32).tobytes())
        for part in parts:
            _fill(file, part.data.cast("B"))
            actual.update(part.data)
        if actual.digest() != digest:
            raise DamagedSlot("differs from its digest")
        if not all(bool(np.isfinite(part).all()) for part in parts):
            raise DamagedSlot("has values that are no numbers")
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _opened(path: Path) -> FileIO:
    try:
        return FileIO(open_input(path), "rb")
    except UnreadableFile as error:
        raise DamagedSlot(str(error)) from error


def _read_head(file: FileIO, identity: bytes, most: int, token_bytes: int) -> tuple[list[int], bytes]:
    head = bytearray(_HEAD.size)
    _fill(file, memoryview(head))
    mark, identity_in_file, count, digest = _HEAD.unpack(head)
    if mark != _MARK or identity_in_file != identity:
        raise DamagedSlot("belongs to another bundle or to other options")
    size = os.fstat(file.fileno()).st_size
    if not 0 < count <= most or size != file_bytes(count, token_bytes):
        raise DamagedSlot(f"has {size} bytes, which no slot of {count} tokens has")
    ids = np.empty(count, np.int32)
    _fill(file, ids.data.cast("B"))
    return ids.tolist(), digest


def _fill(file: FileIO, target: memoryview) -> None:
    done = 0
    while done < len(target):
        try:
            count = file.readinto(target[done:])
        except OSError as error:
            raise DamagedSlot(f"cannot be read: {error.strerror}") from error
        if not count:
            raise DamagedSlot("ends too early")
        done += count
