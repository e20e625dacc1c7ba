"""A folder of prefixes: which texts it has, how many bytes it may take, and what is saved and loaded."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from moec.manifests.codec import encode_manifest
from moec.manifests.errors import InputError, OptionError
from moec.runtime.engine.engine import Engine

from .prefix_file import (
    SUFFIX,
    UNFINISHED_SUFFIX,
    DamagedPrefix,
    file_bytes,
    name_of,
    read_prefix,
    read_tokens,
    write_prefix,
)

LEAST_TOKENS = 32
"""Shorter beginnings are computed as fast as they are read."""
MOST_FILES = 256


@dataclass(frozen=True, slots=True)
class _Saved:
    path: Path
    tokens: np.ndarray

    def common(self, text: np.ndarray) -> int:
        """Return the number of tokens that the text has in common with this file."""
        most = min(len(self.tokens), len(text))
        differing = np.flatnonzero(self.tokens[:most] != text[:most])
        return int(differing[0]) if len(differing) else most


class PrefixStore:
    """Prefixes of one bundle in one folder. Only the engine's thread uses it.

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
        if not engine.is_lossless or engine.accelerator is not None or engine.model.spec.encoder is not None:
            raise OptionError(
                "`--prefix-cache` is for lossless runs on the CPU of models without an encoder", "leave it out"
            )
        self._engine, self._folder, self._limit, self._report = engine, folder, limit_bytes, report
        self._context = engine.memory.context
        self._token_bytes = sum(part.nbytes for part in engine.kv.prefix_parts(0, 1))
        self._identity = identity_of(engine)
        self.saved = self.loaded = 0
        _check_folder(folder)
        self._remove_unfinished()
        self._others = list[tuple[Path, int]]()
        self._files = self._known_files()
        self._make_room(0)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, those of other bundles included."""
        own = sum(file_bytes(len(each.tokens), self._token_bytes) for each in self._files)
        return own + sum(size for _, size in self._others)

    def longest(self, tokens: Sequence[int]) -> int:
        """Return the most tokens at the beginning of a text that a file has. One token is left over."""
        text = np.asarray(tokens, np.int32)
        return max((min(each.common(text), len(tokens) - 1) for each in self._files), default=0)

    def load(self, slot: int, tokens: Sequence[int]) -> list[int]:
        """Fill a slot from the file with the longest common beginning. Returns the tokens that the slot then holds.

        The slot must hold nothing that is needed. Without a sound file it holds nothing.
        """
        text = np.asarray(tokens, np.int32)
        while self.longest(tokens) > 0:
            found = max(self._files, key=lambda each: each.common(text))
            count = len(found.tokens)
            self._engine.copy_prefix(slot, slot, count)  # copies nothing, and makes room for the positions
            try:
                read_prefix(
                    found.path, self._identity, found.tokens.tolist(), self._engine.kv.prefix_parts(slot, count)
                )
            except DamagedPrefix as error:
                self._refuse(found, error)
                continue
            self._files.remove(found)
            self._files.append(found)
            with contextlib.suppress(OSError):
                os.utime(found.path)
            self.loaded += count
            return list(tokens[: min(found.common(text), len(tokens) - 1)])
        return []

    def save(self, slot: int, tokens: Sequence[int]) -> None:
        """Save what a slot holds, unless a file has it. Files with beginnings of it are removed."""
        size = file_bytes(len(tokens), self._token_bytes)
        if len(tokens) < LEAST_TOKENS or size > self._limit:
            return
        text = np.asarray(tokens, np.int32)
        if any(each.common(text) == len(text) for each in self._files):
            return
        path = self._folder / name_of(tokens)
        parts = self._engine.kv.prefix_parts(slot, len(tokens))
        for each in [each for each in self._files if each.common(text) == len(each.tokens)]:
            self._remove(each)
        self._make_room(size)
        try:
            write_prefix(path, self._identity, tokens, parts)
        except OSError as error:
            self._report(f"a prefix cannot be saved in `{self._folder}`: {error.strerror or error}")
            return
        self._files.append(_Saved(path, text))
        self.saved += len(tokens)

    def _remove_unfinished(self) -> None:
        """Remove what a server that was killed has left half-written, and say how many files there were."""
        removed = 0
        for path in [path for path in self._folder.iterdir() if path.name.endswith(UNFINISHED_SUFFIX)]:
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
        if removed:
            self._report(f"unfinished prefixes in `{self._folder}` are removed: {removed}")

    def _known_files(self) -> list[_Saved]:
        """Return the files of this bundle, least recently used first, and note the other ones."""
        paths = [path for path in self._folder.iterdir() if path.name.endswith(SUFFIX)]
        ordered = sorted((path for path in paths if not path.is_symlink()), key=_used_s, reverse=True)
        found = list[_Saved]()
        for path in ordered:
            try:
                if len(found) == MOST_FILES:
                    raise DamagedPrefix("is one too many")
                tokens = read_tokens(path, self._identity, self._context, self._token_bytes)
            except DamagedPrefix as error:
                self._report(f"`{path}` is not used: it {error}")
                self._others.append((path, path.lstat().st_size))
                continue
            found.append(_Saved(path, np.asarray(tokens, np.int32)))
        return found[::-1]

    def _make_room(self, size: int) -> None:
        """Remove files until one more of this size fits: those of other bundles first, then the least recently used."""
        while self._others and self.used_bytes + size > self._limit:
            path, _ = self._others.pop()
            with contextlib.suppress(OSError):
                path.unlink()
        while self._files and (len(self._files) >= MOST_FILES or self.used_bytes + size > self._limit):
            self._remove(self._files[0])

    def _refuse(self, saved: _Saved, error: DamagedPrefix) -> None:
        self._report(f"`{saved.path}` is removed: it {error}")
        self._remove(saved)

    def _remove(self, saved: _Saved) -> None:
        self._files.remove(saved)
        with contextlib.suppress(OSError):
            saved.path.unlink()


def identity_of(engine: Engine) -> bytes:
    """Return a digest of all that decides the bits of keys and values: bundle, their type, and activations."""
    options = engine.options
    digest = sha256(encode_manifest(engine.bundle.manifest))
    digest.update(f"{options.kv} {options.modes.expert_activations}".encode())
    return digest.digest()


def _check_folder(folder: Path) -> None:
    """Make the folder. Raises InputError if others can write to it, because they could change answers."""
    remedy = "name a folder of your own: mkdir -m 700 DIR"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise InputError(f"`{folder}` cannot be used for prefixes: {error.strerror}", remedy) from error
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InputError(f"`{folder}` can be changed by other users", remedy)


def _used_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
