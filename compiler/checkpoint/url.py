"""A checkpoint at an fsspec URL: its files are copied into a folder of this machine.

A file is not copied again while the file system reports the same checksum for it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from moec.manifests.errors import CheckpointError, MoecError

from ..workspace.durable import Disk, disk_errors

CACHE = Path(".cache") / "moec" / "checkpoints"
"""Below the home folder; holds one folder per URL."""
_STATE_NAME = ".fetched.json"
_LOCK_NAME = ".lock"
_PIECE_BYTES = 8 << 20
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
"""Permitted file names of a checkpoint: no path, no hidden file."""


def is_url(source: str) -> bool:
    """Return whether a checkpoint is named by a URL such as `s3://bucket/mixtral`."""
    return "://" in source


def url_name(url: str) -> str:
    """Return the last part of a URL that is not empty: the name of the model."""
    return PurePosixPath(url.partition("://")[2].rstrip("/")).name or "model"


def fetch(url: str, patterns: tuple[str, ...], cache: Path | None = None) -> Path:
    """Return the local folder with the files of a URL whose names match a pattern.

    cache: parent of the local folders, by default CACHE of the user. Several processes may call this at once.
    Raises CheckpointError if the place does not exist, the file system refuses, or its package is missing.
    Raises DoesNotFit or MoecError if the disk refuses.
    """
    url = url.rstrip("/")
    plain_name = re.sub(r"[^A-Za-z0-9._-]", "-", url_name(url))[:60]
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    folder = (Path.home() / CACHE if cache is None else cache) / f"{plain_name}-{digest}"
    with _foreign_errors(url):
        system, root, listed = _listed(url)
        wanted = {name: info for name, info in sorted(listed.items()) if any(fnmatch(name, p) for p in patterns)}
        tokens = {name: str(system.checksum(f"{root}/{name}")) for name in wanted}
        sizes = {name: info.get("size") for name, info in wanted.items()}
    if not wanted:
        raise CheckpointError(f"`{url}` holds no file of a checkpoint", "name the folder that holds config.json")
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / _LOCK_NAME):
            _copy(url, system, root, folder, tokens, sizes)
    return folder


def _copy(
    url: str, system: Any, root: str, folder: Path, tokens: Mapping[str, str], sizes: Mapping[str, int | None]
) -> None:
    """Make the folder hold exactly these files. A file recorded with the same token is not copied again."""
    state, disk = _state(folder), Disk()
    for path in folder.iterdir():
        if path.name not in (*tokens, _STATE_NAME, _LOCK_NAME):
            path.unlink()
    for name, token in tokens.items():
        if state.get(name) == token and (folder / name).is_file():
            continue
        with _foreign_errors(url):
            file = system.open(f"{root}/{name}", "rb")
        with file, disk.create(folder / name) as target:
            while piece := _read(file, url):
                target.write(piece)
            if sizes[name] is not None and target.size_bytes != sizes[name]:
                raise CheckpointError(
                    f"`{url}/{name}` ended after {target.size_bytes} bytes, expected {sizes[name]}", "start again"
                )
        state = {**state, name: token}
        disk.write_file(folder / _STATE_NAME, json.dumps(state).encode())


def _listed(url: str) -> tuple[Any, str, dict[str, Any]]:
    """Return the file system, the folder in it, and the folder's files by name. Raises the errors of fsspec."""
    from fsspec.core import url_to_fs

    system, root = url_to_fs(url)
    root = root.rstrip("/")
    entries = {PurePosixPath(info["name"]).name: info for info in system.ls(root, detail=True)}
    files = {name: info for name, info in entries.items() if info.get("type") == "file" and PLAIN_NAME.fullmatch(name)}
    return system, root, files


def _read(file: Any, url: str) -> bytes:
    with _foreign_errors(url):
        piece: bytes = file.read(_PIECE_BYTES)
    return piece


@contextmanager
def _foreign_errors(url: str) -> Iterator[None]:
    """Turn every error of an fsspec file system into a CheckpointError that names the URL."""
    try:
        yield
    except MoecError:
        raise
    except ImportError as error:
        raise CheckpointError(f"`{url}` cannot be read: {error}", "install that package") from error
    except FileNotFoundError as error:
        raise CheckpointError(f"no folder `{url}`, expected a Hugging Face model folder", "check the URL") from error
    except Exception as error:  # botocore, aiohttp, gcsfs, paramiko, ...: each has its own
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise CheckpointError(f"`{url}` cannot be read: {reason}", "check the URL and your access to it") from error


def _state(folder: Path) -> dict[str, str]:
    try:
        tokens = json.loads((folder / _STATE_NAME).read_bytes())
    except (OSError, ValueError):
        return {}
    return tokens if isinstance(tokens, dict) else {}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
