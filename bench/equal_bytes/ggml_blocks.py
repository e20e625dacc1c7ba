"""Quantization of a matrix into llama.cpp's blocks, by its own function, and back.

Shapes: N rows, K columns.
"""

from __future__ import annotations

import ctypes
import math
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
LIBRARY = "libggml-base.so"


def library_path() -> Path:
    """Return the library in the package llama-cpp-python. Raises SystemExit if it is not installed."""
    found = find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise SystemExit('llama.cpp is missing: pip install -e ".[bench]", or name the library with --ggml')
    return Path(found.origin).parent / "lib" / LIBRARY


class GgmlBlocks:
    """llama.cpp's quantization, with importance data.

    path: `libggml-base.so`.
    """

    def __init__(self, path: Path) -> None:
        self._quantize = ctypes.CDLL(str(path)).ggml_quantize_chunk
        floats = ctypes.POINTER(ctypes.c_float)
        counts = [ctypes.c_int64] * 3
        self._quantize.argtypes = [ctypes.c_int, floats, ctypes.c_void_p, *counts, floats]
        self._quantize.restype = ctypes.c_size_t

    def rounded(self, matrix: Matrix, block_type: str, importance: Matrix) -> tuple[Matrix, int]:
        """Return a matrix after quantization, [N, K], and its bytes.

        Blocks need rows of a multiple of 256 or 32 columns. For other K, as many rows as needed are laid end to end.
        In such a case llama.cpp takes a simpler block type, so this is in its favour.
        importance: mean square of each input, [K].
        """
        kind = gguf.GGMLQuantizationType[block_type]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows, columns = matrix.shape
        joined = math.lcm(columns, block) // columns
        if rows % joined:
            raise SystemExit(f"{rows} rows of {columns} do not divide into blocks of {block_type}")
        source = np.ascontiguousarray(matrix, np.float32)
        weights = np.ascontiguousarray(np.tile(importance, joined), np.float32)
        size = source.size // block * block_bytes
        target = np.empty(size, np.uint8)
        floats = ctypes.POINTER(ctypes.c_float)
        written = self._quantize(
            int(kind),
            source.ctypes.data_as(floats),
            target.ctypes.data,
            0,
            rows // joined,
            columns * joined,
            weights.ctypes.data_as(floats),
        )
        if written != size:
            raise RuntimeError(f"{block_type}: {written} bytes, expected {size}")
        values = gguf.quants.dequantize(target.reshape(rows // joined, -1), kind)
        return values.reshape(rows, columns).astype(np.float32), size
