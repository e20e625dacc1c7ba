"""llama.cpp's quantization: its mixtures, importance data as its tool counts them, and its blocks by its own function.

Source of the mixtures: `llama_tensor_get_type_impl` in `src/llama-quant.cpp` of llama.cpp, as in llama-cpp-python
0.3.36. Its special cases for models of exactly eight experts and for other architectures are left out.
Shapes: N rows, K columns, E experts.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moec.compiler.reference.expert_module import intermediate
from moec.compiler.walker.texts import TextStates, TokenTexts
from moec.compiler.workspace.parallel import workers

from ..example import Example

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


Rule = Callable[[int, int], str]
"""Block type of a down matrix, from the index of its layer and the number of layers."""


def _always(usual: str) -> Rule:
    return lambda layer, layers: usual


def _first_eighth(special: str, usual: str) -> Rule:
    return lambda layer, layers: special if layer < layers // 8 else usual


def _more_bits(special: str, usual: str) -> Rule:
    """Give the first and the last eighth of the layers, and every third one between them, the special type."""

    def chosen(layer: int, layers: int) -> str:
        eighth = layers // 8
        is_special = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
        return special if is_special else usual

    return chosen


def _q3_k_m(layer: int, layers: int) -> str:
    return "Q5_K" if layer < layers // 16 else "Q4_K"


MIXTURES: dict[str, tuple[str, Rule]] = {
    "IQ2_XXS": ("IQ2_XXS", _first_eighth("Q2_K", "IQ2_XXS")),
    "IQ2_XS": ("IQ2_XS", _first_eighth("Q2_K", "IQ2_XS")),
    "IQ2_M": ("IQ2_S", _first_eighth("IQ3_S", "IQ2_S")),
    "Q2_K": ("Q2_K", _always("Q3_K")),
    "IQ3_XXS": ("IQ3_XXS", _always("IQ3_XXS")),
    "Q3_K_S": ("Q3_K", _always("Q3_K")),
    "IQ3_M": ("IQ3_S", _first_eighth("Q4_K", "IQ3_S")),
    "Q3_K_M": ("Q3_K", _q3_k_m),
    "IQ4_XS": ("IQ4_XS", _always("IQ4_XS")),
    "IQ4_NL": ("IQ4_NL", _always("IQ4_NL")),
    "Q4_0": ("Q4_0", _first_eighth("Q4_1", "Q4_0")),
    "Q4_K_S": ("Q4_K", _first_eighth("Q5_K", "Q4_K")),
    "Q4_K_M": ("Q4_K", _more_bits("Q6_K", "Q4_K")),
    "Q5_K_S": ("Q5_K", _always("Q5_K")),
    "Q5_K_M": ("Q5_K", _more_bits("Q6_K", "Q5_K")),
    "Q6_K": ("Q6_K", _always("Q6_K")),
    "Q8_0": ("Q8_0", _always("Q8_0")),
}
"""For each mixture the type of gate and up matrices, and the rule of down matrices. From few bits to many."""


def block_type(mixture: str, projection: str, layer: int, layers: int) -> str:
    """Return the block type of one matrix."""
    usual, of_down = MIXTURES[mixture]
    return of_down(layer, layers) if projection == "down" else usual


def importance_of(example: Example, texts: TokenTexts) -> dict[tuple[int, str], Tensor]:
    """Return the mean squares of the inputs of each expert, [E, K], by layer and projection.

    An expert without tokens has ones.
    """
    slot, moments = example.slot, dict[tuple[int, str], Tensor]()
    states = TextStates.begin(texts, slot.embed, tokens_per_batch=1)  # so that no padding is counted
    for layer in range(example.model.num_layers):
        slot.load(layer)
        module, held = slot.experts, list[tuple[Tensor, Tensor]]()
        handle = module.register_forward_pre_hook(lambda _, given, held=held: held.append(given[:2]))
        with workers(1) as pool:
            slot.run([states], pool)
        handle.remove()
        inputs, chosen = (torch.cat(parts) for parts in zip(*held, strict=True))
        for expert in range(module.num_experts):
            read = inputs[torch.where(chosen == expert)[0]]
            for projection, values in (("gate", read), ("up", read), ("down", intermediate(module, expert, read))):
                means = moments.setdefault((layer, projection), torch.ones(module.num_experts, values.shape[1]))
                if len(values):
                    means[expert] = values.square().mean(0)
    return moments
