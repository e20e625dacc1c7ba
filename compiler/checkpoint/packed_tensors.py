"""Find the weights of a checkpoint that are stored quantized, by the names and shapes of their tensors.

`packed_weights.py` decodes them. A label in config.json says only that there are some. What a tensor is follows from
its parts, because labels differ from what tools wrote.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from . import packed_weights
from .packed_weights import DEFAULT_BLOCK, LayoutError, PackedWeight
from .weight_files import TensorRef

METHODS = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt")
"""Values of `quant_method` whose weights are decoded."""
_UNUSED = (
    "input_scale", "output_scale", "input_zero_point", "k_scale", "v_scale", "weight_global_scale", "bias_scale",
    "input_global_scale",
)  # fmt: skip
"""Parts that describe activations, which the runtime rounds in its own way."""
_GPTQ = frozenset({"qweight", "qzeros", "scales"})
_INTEGERS = frozenset({"weight_packed", "weight_scale", "weight_shape"})
GPTQ_NAME = "GPTQ"
_SAMPLED = 32
"""Weights that are read to tell the versions of GPTQ apart."""
_SURE_STEPS = 0.1
"""Standard error of a mean code at which the versions, one step apart, are told apart."""
_WORDS = frozenset({"qweight", "qzeros", "weight_packed"})
"""Parts that are 32-bit words of codes."""
_SCALES = ("weight_scale_inv", "weight_scale")
_FLOATS = ("F8_E4M3", "F8_E5M2")
_NVFP4_PARTS = (("weight_packed", "weight_global_scale"), ("weight", "weight_scale_2"))
"""4-bit floats and their scale in all: of compressed-tensors, and of ModelOpt."""


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """The quantized weights of a checkpoint.

    weights: by the name of the weight.
    parts: all tensors on disk that belong to them, or describe activations.
    """

    weights: Mapping[str, PackedWeight]
    parts: frozenset[str]

    def precision(self) -> str:
        """Return the stored precisions, most frequent first; empty if nothing is quantized."""
        counts = defaultdict[str, int](int)
        for weight in self.weights.values():
            counts[weight.precision] += 1
        return ", ".join(sorted(counts, key=lambda name: (-counts[name], name)))


def find_packed(
    tensors: Mapping[str, TensorRef], config: Mapping[str, Any], read: Callable[[str], Tensor]
) -> PackedTensors:
    """Return the quantized weights among the tensors of a checkpoint.

    config: `quantization_config` of config.json.
    read: returns a small tensor.
    Raises LayoutError, with the name of the weight first.
    """
    modules = defaultdict[str, dict[str, str]](dict)
    for name in tensors:
        module, _, suffix = name.rpartition(".")
        modules[module][suffix] = name
    weights, parts = dict[str, PackedWeight](), set[str]()
    for module, names in modules.items():
        try:
            packed = _weight(names, tensors, config, read)
        except LayoutError as error:
            raise LayoutError(f"`{module}.weight`: {error}") from error
        if packed is not None:
            weights[f"{module}.weight"] = packed
            parts.update(packed.names.values())
            parts.update(names[suffix] for suffix in ("weight_shape", "g_idx", "weight_g_idx") if suffix in names)
        parts.update(names[suffix] for suffix in _UNUSED if suffix in names)
    if not _is_less_one(weights, config, read):
        for name, weight in weights.items():
            if "qweight" in weight.names and weight.precision.startswith(GPTQ_NAME):
                shapes = {suffix: tensors[stored].shape for suffix, stored in weight.names.items()}
                weights[name] = packed_weights.gptq(weight.names, shapes, is_less_one=False)
    return PackedTensors(weights, frozenset(parts))


def _is_less_one(weights: Mapping[str, PackedWeight], config: Mapping[str, Any], read: Callable[[str], Tensor]) -> bool:
    """Return whether the zeros of GPTQ are stored less one, which version 1 of the format does.

    Labels are not reliable. Symmetric weights have the middle code as their zero, or one less. Others are centred: with
    the wrong zeros all of them are off by one step. The label decides only if the weights are too few to tell.
    """
    total, variance, count = 0.0, 0.0, 0
    for weight in [packed for packed in weights.values() if packed.precision.startswith(GPTQ_NAME)][:_SAMPLED]:
        parts = {suffix: read(stored) for suffix, stored in weight.names.items()}
        mean, spread, size = packed_weights.code_less_zero(parts, weight)
        if not spread:
            return mean > 0.5
        total, variance, count = total + mean * size, max(variance, spread), count + size
        if math.sqrt(variance / count) < _SURE_STEPS:
            return total / count > 0.5
    return config.get("checkpoint_format") != "gptq_v2"


def _weight(
    names: Mapping[str, str], tensors: Mapping[str, TensorRef], config: Mapping[str, Any], read: Callable[[str], Tensor]
) -> PackedWeight | None:
    """Return the quantized weight of a module, or None if it has none."""
    shapes = {suffix: tensors[name].shape for suffix, name in names.items()}
    for blocks, global_scale in _NVFP4_PARTS:
        if blocks in names and tensors[names[blocks]].dtype == "U8":
            return _four_bit_floats(names, tensors, blocks, global_scale)
    for suffix in _WORDS & set(names):
        if tensors[names[suffix]].dtype not in ("I32", "U32"):
            raise LayoutError(f"expected 32-bit integers in `{suffix}`, found {tensors[names[suffix]].dtype}")
    if set(names) >= _GPTQ:
        stored_names = {suffix: names[suffix] for suffix in (*_GPTQ, "g_idx") if suffix in names}
        words, outputs = (shapes[suffix][-1] if len(shapes[suffix]) == 2 else 0 for suffix in ("qweight", "scales"))
        if words == outputs:
            return packed_weights.gptq(stored_names, shapes)
        return packed_weights.awq({suffix: name for suffix, name in stored_names.items() if suffix != "g_idx"}, shapes)
    if set(names) >= _INTEGERS:
        optional = ("weight_zero_point", "weight_g_idx")
        stored_names = {
            suffix: names[suffix] for suffix in ("weight_packed", "weight_scale", *optional) if suffix in names
        }
        stored = [int(extent) for extent in read(names["weight_shape"]).flatten().tolist()]
        if len(stored) != 2:
            raise LayoutError(f"expected two numbers in `weight_shape`, found {stored}")
        return packed_weights.packed_integers(stored_names, shapes, (stored[0], stored[1]))
    dtype = tensors[names["weight"]].dtype if "weight" in names else ""
    if dtype != "I8" and dtype not in _FLOATS:
        return None
    scale = next((suffix for suffix in _SCALES if suffix in names), None)
    if scale is None:
        raise LayoutError(f"expected `{_SCALES[0]}` or `{_SCALES[1]}` next to a weight of {dtype}, found neither")
    stored_names = {"weight": names["weight"], "scale": names[scale]}
    stored_names |= {suffix: names[suffix] for suffix in ("weight_zero_point",) if suffix in names}
    kind = "8-bit integers" if dtype == "I8" else f"FP8 ({dtype.removeprefix('F8_')})"
    return packed_weights.scaled(stored_names, {**shapes, "scale": shapes[scale]}, _block(config), kind, dtype == "I8")


def _four_bit_floats(
    names: Mapping[str, str], tensors: Mapping[str, TensorRef], blocks: str, global_scale: str
) -> PackedWeight:
    """Return a weight of 4-bit floats: NVFP4 if scales are 8-bit floats, else MXFP4. Raises LayoutError."""
    scale_type = tensors[names["weight_scale"]].dtype if "weight_scale" in names else "none"
    if scale_type == "F8_E4M3" and global_scale in names:
        stored_names = {"blocks": names[blocks], "scale": names["weight_scale"], "global_scale": names[global_scale]}
        shapes = {part: tensors[name].shape for part, name in stored_names.items()}
        return packed_weights.nvfp4(stored_names, shapes, divides=blocks == "weight_packed")
    if scale_type != "U8" or blocks != "weight_packed":
        raise LayoutError(
            "expected `weight_scale` next to 4-bit floats: exponents in bytes (MXFP4), or 8-bit floats with "
            f"`{global_scale}` (NVFP4); found {scale_type}"
        )
    stored_names = {suffix: names[suffix] for suffix in ("weight_packed", "weight_scale")}
    return packed_weights.mxfp4_rows(stored_names, {part: tensors[name].shape for part, name in stored_names.items()})


def _block(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return rows and columns that share a scale. Raises LayoutError."""
    block = config.get("weight_block_size") or DEFAULT_BLOCK
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise LayoutError(f"expected two positive numbers in `weight_block_size`, found {str(block)[:80]}")
    return block[0], block[1]
