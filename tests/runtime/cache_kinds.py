"""Engines with either expert cache, that of the extension or its specification in Python, and with other kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest

from moec.runtime import kernels
from moec.runtime.engine import mode_line
from moec.runtime.expert_cache import open_cache as choice_of_cache
from moec.runtime.expert_cache.interface import StreamingCache
from moec.runtime.expert_cache.native_cache import NativeCache
from moec.runtime.expert_cache.python_cache import PythonCache
from moec.runtime.model import one_call

Kind = type[StreamingCache]
both_caches = pytest.mark.parametrize("kind", [NativeCache, PythonCache])


@contextmanager
def caches_of(kind: Kind) -> Iterator[None]:
    """Engines that are loaded here have this kind of cache.

    Without the extension the test of a NativeCache is skipped.
    """
    if kind is NativeCache and kernels.compiled() is None:
        pytest.skip("no extension")
    with ExitStack() as patches:
        if kind is PythonCache:
            for module in (choice_of_cache, mode_line, one_call):
                patches.enter_context(mock.patch.object(module, "why_not_native", return_value="a test"))
        yield


@contextmanager
def kernels_of(name: str) -> Iterator[None]:
    """Select kernels for a block."""
    before = kernels.active()
    kernels.select(name)
    try:
        yield
    finally:
        kernels.select(before)
