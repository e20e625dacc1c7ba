"""Arrays that end where a forbidden page begins: a read or write past the end is a crash."""

from __future__ import annotations

import ctypes
import math
import mmap

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(values: np.ndarray) -> np.ndarray:
    """Return a copy of an array that ends directly before a page without access."""
    page = mmap.PAGESIZE
    space = -(-max(values.nbytes, 1) // page) * page
    mapped = mmap.mmap(-1, space + page)
    whole = np.frombuffer(mapped, np.uint8)
    address = whole.__array_interface__["data"][0]
    if _LIBC.mprotect(address + space, page, 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    found = whole[space - values.nbytes : space].view(values.dtype).reshape(values.shape)
    found[...] = values
    if not math.prod(values.shape):
        return values
    return found
