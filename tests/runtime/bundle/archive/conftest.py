"""A tiny bundle and its archive, both read only; the disk is not waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moec.runtime.bundle.archive import pack_bundle
from moec.runtime.bundle.archive.layout import MIN_CHUNK_BYTES
from tests.runtime.tiny_bundle import write_bundle


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("archive") / "tiny-moec")


@pytest.fixture(scope="session")
def packed(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The archive, with the smallest chunks that the format allows."""
    path = tmp_path_factory.mktemp("archive") / "tiny.moecpack"
    pack_bundle(bundle, path, chunk_bytes=MIN_CHUNK_BYTES)
    return path.read_bytes()
