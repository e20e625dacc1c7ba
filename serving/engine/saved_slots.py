"""A folder of saved slots: which texts it has, how many bytes it may take, and what is saved and loaded.

The layout of a file, in the byte order of the machine: a fixed head, the token ids (int32), then the arrays of
`KVCache.prefix_parts`. The head has a mark, the identity of bundle and options, the number of tokens, and the SHA-256
of all that follows it. So the length of a file is known from its number of tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from moec.manifests.codec import encode_manifest
from moec.manifests.errors import InputError, OptionError
from moec.manifests.files.input_file import UnreadableFile, open_input
from moec.manifests.files.output_file import AtomicFile, FileSystem
from moec.runtime.engine.engine import Engine
from moec.runtime.engine.slots import Slot
from moec.runtime.layers.kv_cache import KV_TYPES

LEAST_TOKENS = 32
"""Shorter beginnings are computed as fast as they are read."""
MOST_FILES = 256
_MARK = b"moec-kv1"
_HEAD = struct.Struct("=8s32sQ32s")
SUFFIX, UNFINISHED_SUFFIX = ".kv", ".kv.partial"
"""File names are the first 32 digits of the digest of the tokens, and this."""


@dataclass(frozen=True, slots=True)
class _SavedSlot:
    path: Path
    tokens: np.ndarray

    def common(self, text: np.ndarray) -> int:
        """Return the number of tokens that the text has in common with this file."""
        most = min(len(self.tokens), len(text))
        differing = np.flatnonzero(self.tokens[:most] != text[:most])
        return int(differing[0]) if len(differing) else most


class SavedSlots:
    """Saved slots of one bundle in one folder. Only the engine's thread uses it.

    A file that is damaged, that another bundle wrote, or that does not fit is never used.
    Files go when the bytes exceed the limit: first those that are not used, then the least recently used.

    saved, loaded: tokens that were saved and loaded since the start.
    """

    def __init__(self, engine: Engine, folder: Path, limit_bytes: int, report: Callable[[str], None]) -> None:
        """limit_bytes: most bytes of all files.

        report: called with one sentence for a file that is refused, or that cannot be written.
        Raises InputError for a folder that others can write to, OptionError for a run whose keys and values may differ
        from those of another run.
        """
        if not engine.is_exact or engine.accelerator is not None or not engine.slots.can_reuse:
            raise OptionError(
                "`--prefix-cache` is for exact runs on the CPU of models without an encoder or expert capacities",
                "leave it out",
            )
        self._engine, self._folder, self._limit, self._report = engine, folder, limit_bytes, report
        self._context = engine.memory.context
        self._sizes = slot_sizes(engine)
        self._identity = identity_of(engine)
        self.saved = self.loaded = 0
        # Others who can write to the folder could change answers.
        remedy = "name a folder of your own: mkdir -m 700 DIR"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
        except OSError as error:
            raise InputError(f"`{folder}` cannot be used for saved slots: {error.strerror}", remedy) from error
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise InputError(f"`{folder}` can be changed by other users", remedy)
        self._remove_unfinished()
        self._others = list[tuple[Path, int]]()
        self._files = self._known_files()
        self._make_room(0)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, those of other bundles included."""
        own_bytes = sum(file_bytes(len(saved.tokens), self._sizes) for saved in self._files)
        return own_bytes + sum(size for _, size in self._others)

    def longest(self, tokens: Sequence[int]) -> int:
        """Return the most tokens at the beginning of a text that a file has. One token is left over."""
        text = np.asarray(tokens, np.int32)
        return max((self._usable(saved, text) for saved in self._files), default=0)

    def _usable(self, saved: _SavedSlot, text: np.ndarray) -> int:
        """Return the tokens of a text that a file has. A file with states, or with a part of windows, is used whole."""
        length, count = min(saved.common(text), len(text) - 1), len(saved.tokens)
        is_whole = self._sizes.state_bytes > 0 or 0 < self._sizes.window <= count
        return 0 if is_whole and length < count else length

    def load(self, slot: Slot, tokens: Sequence[int]) -> None:
        """Fill a slot from the file with the longest common beginning.

        The slot must hold nothing that is needed. Without a sound file it holds nothing.
        """
        slot.tokens = []
        text = np.asarray(tokens, np.int32)
        while self.longest(tokens) > 0:
            saved = max(self._files, key=lambda file: self._usable(file, text))
            count = len(saved.tokens)
            self._engine.make_room(slot, count)
            parts = self._engine.kv.parts_to_fill(slot.index, count)
            try:
                read_slot(saved.path, self._identity, saved.tokens.tolist(), parts)
            except DamagedSlot as error:
                self._report(f"`{saved.path}` is removed: it {error}")
                self._remove(saved)
                continue
            self._files.remove(saved)
            self._files.append(saved)
            with contextlib.suppress(OSError):
                os.utime(saved.path)
            self.loaded += count
            slot.tokens = list(tokens[: self._usable(saved, text)])
            return

    def save(self, slot: Slot) -> None:
        """Save what a slot holds, unless a file has it. Files with beginnings of it are removed."""
        tokens = slot.tokens[: self._engine.kv.usable(slot.index, len(slot.tokens))]
        size = file_bytes(len(tokens), self._sizes)
        if len(tokens) < LEAST_TOKENS or size > self._limit:
            return
        text = np.asarray(tokens, np.int32)
        if any(saved.common(text) == len(text) for saved in self._files):
            return
        path = self._folder / name_of(tokens)
        parts = self._engine.kv.prefix_parts(slot.index, len(text))
        for beginning in [saved for saved in self._files if saved.common(text) == len(saved.tokens)]:
            self._remove(beginning)
        self._make_room(size)
        try:
            write_slot(path, self._identity, tokens, parts)
        except OSError as error:
            self._report(f"a slot cannot be saved in `{self._folder}`: {error.strerror or error}")
            return
        self._files.append(_SavedSlot(path, text))
        self.saved += len(text)

    def _remove_unfinished(self) -> None:
        """Remove what a server that was killed has left half-written, and say how many files there were."""
        removed = 0
        for path in [path for path in self._folder.iterdir() if path.name.endswith(UNFINISHED_SUFFIX)]:
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
        if removed:
            self._report(f"unfinished files in `{self._folder}` are removed: {removed}")

    def _known_files(self) -> list[_SavedSlot]:
        """Return the files of this bundle, least recently used first, and note the other ones."""
        paths = [path for path in self._folder.iterdir() if path.name.endswith(SUFFIX)]
        ordered = sorted((path for path in paths if not path.is_symlink()), key=_used_s, reverse=True)
        known = list[_SavedSlot]()
        for path in ordered:
            try:
                if len(known) == MOST_FILES:
                    raise DamagedSlot("is one too many")
                tokens = read_tokens(path, self._identity, self._context, self._sizes)
            except DamagedSlot as error:
                self._report(f"`{path}` is not used: it {error}")
                self._others.append((path, path.lstat().st_size))
                continue
            known.append(_SavedSlot(path, np.asarray(tokens, np.int32)))
        return known[::-1]

    def _make_room(self, size: int) -> None:
        """Remove files until one more of this size fits: those of other bundles first, then the least recently used."""
        while self._others and self.used_bytes + size > self._limit:
            path, _ = self._others.pop()
            with contextlib.suppress(OSError):
                path.unlink()
        while self._files and (len(self._files) >= MOST_FILES or self.used_bytes + size > self._limit):
            self._remove(self._files[0])

    def _remove(self, saved: _SavedSlot) -> None:
        self._files.remove(saved)
        with contextlib.suppress(OSError):
            saved.path.unlink()


def identity_of(engine: Engine) -> bytes:
    """Return a digest of all that decides the bits of keys and values: bundle, their type, and activations."""
    options = engine.options
    digest = sha256(encode_manifest(engine.bundle.manifest))
    digest.update(f"{options.kv} {options.modes.expert_activations}".encode())
    return digest.digest()


def _used_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


class DamagedSlot(Exception):
    """A file that is no sound slot of this bundle. The message follows its name."""


def name_of(tokens: Sequence[int]) -> str:
    """Return the name of the file of a text."""
    return hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:32] + SUFFIX


class SlotSizes(NamedTuple):
    """Bytes of the keys and values of one token, of the recurrent states of a slot, and of windows.

    window_bytes: keys and values of one token in layers of which only the last `window` - 1 positions are saved.
    """

    token_bytes: int
    state_bytes: int
    window_bytes: int = 0
    window: int = 0


def slot_sizes(engine: Engine) -> SlotSizes:
    """Return what a saved slot of an engine takes."""
    model, element_bytes = engine.model.spec, np.dtype(KV_TYPES[engine.options.kv]).itemsize
    all_bytes = model.kv_bytes_per_position * element_bytes // 4
    windows, windowed = engine.kv.windows, 0
    if windows is not None:
        windowed = sum(part.nbytes for part in engine.kv.windowed_parts(0, 1))
    return SlotSizes(all_bytes - windowed, model.state_bytes, windowed, 0 if windows is None else windows.window)


def file_bytes(tokens: int, sizes: SlotSizes) -> int:
    """Return the length of a file."""
    windowed = min(tokens, max(sizes.window - 1, 0)) * sizes.window_bytes
    return _HEAD.size + tokens * (4 + sizes.token_bytes) + windowed + sizes.state_bytes


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


def read_tokens(path: Path, identity: bytes, most: int, sizes: SlotSizes) -> list[int]:
    """Return the token ids of a file, after a check of its head and length. Its content is not checked yet.

    most: most tokens, the context of the run.
    Raises DamagedSlot.
    """
    with _opened(path) as file:
        return _read_head(file, identity, most, sizes)[0]


def read_slot(path: Path, identity: bytes, tokens: Sequence[int], parts: Sequence[np.ndarray]) -> None:
    """Fill arrays with the content of a file. Raises DamagedSlot; the arrays then hold anything.

    tokens: token ids that the file must have.
    """
    sizes = SlotSizes(0, sum(part.nbytes for part in parts))
    with _opened(path) as file:
        ids, digest = _read_head(file, identity, len(tokens), sizes)
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


def _read_head(file: FileIO, identity: bytes, most: int, sizes: SlotSizes) -> tuple[list[int], bytes]:
    head = bytearray(_HEAD.size)
    _fill(file, memoryview(head))
    mark, identity_in_file, count, digest = _HEAD.unpack(head)
    if mark != _MARK or identity_in_file != identity:
        raise DamagedSlot("belongs to another bundle or to other options")
    size = os.fstat(file.fileno()).st_size
    if not 0 < count <= most or size != file_bytes(count, sizes):
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
