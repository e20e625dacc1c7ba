"""Under `make sanitize` alone: that what is tested there is the sanitized extension, and that it ends at a fault."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif("libasan" not in os.environ.get("LD_PRELOAD", ""), reason="only under make sanitize")


def test_the_extension_is_the_sanitized_one() -> None:
    from moec.runtime import kernels

    extension = kernels.loaded()
    assert extension is not None and extension.__file__ is not None
    path = Path(extension.__file__)
    assert "sanitize" in path.parts
    assert b"__asan_report_load" in path.read_bytes() and b"__ubsan_handle" in path.read_bytes()


def test_a_read_past_the_end_ends_the_process() -> None:
    """An array that says it is longer than its memory, as no caller can make one through the checks."""
    code = """
import ctypes, numpy as np
from moec.runtime import kernels
extension = kernels.loaded()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
memory = (ctypes.c_float * 64).from_address(libc.malloc(16))
x = np.frombuffer(memory, np.float32)
extension.select("scalar")  # masked loads of the vector kernels are not seen
extension.exp(x, np.zeros(64, np.float32))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr
