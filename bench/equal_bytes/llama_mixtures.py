"""The block type of each expert matrix in llama.cpp's mixtures, with importance data.

Source: `llama_tensor_get_type_impl` in `src/llama-quant.cpp` of llama.cpp, as in llama-cpp-python 0.3.36. Its special
cases for models of exactly eight experts and for other architectures are left out.
"""

from __future__ import annotations

from collections.abc import Callable

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
