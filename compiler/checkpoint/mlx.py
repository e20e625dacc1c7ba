"""Checkpoints of mlx-lm with affine quantization: their weights by the names of a Hugging Face folder.

mlx-lm stacks the experts of a layer. Families whose other tensors it changes, too, are refused: their files look like
those of Hugging Face and hold other numbers, such as norms plus one.
Source: mlx-lm 0.32, `sanitize` of its models; MLX, docs of `quantize`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import packed_weights
from .packed_weights import LayoutError, PackedWeight
from .weight_files import TensorRef

_STACK = ".switch_mlp."
_BITS = (2, 3, 4, 5, 6, 8)
_PARTS = ("weight", "scales", "biases")
_EXPERTS = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
_PROJECTIONS = {
    "glm4_moe": _EXPERTS, "olmoe": _EXPERTS, "qwen2_moe": _EXPERTS, "qwen3_moe": _EXPERTS,
    "mixtral": {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
}  # fmt: skip
"""Families of which only experts are renamed, with the names of their projections."""


@dataclass(frozen=True, slots=True)
class MlxTensors:
    """The tensors of a checkpoint.

    plain: those that are not quantized.
    weights, parts: quantized weights, and what is on disk of them.
    """

    plain: Mapping[str, TensorRef]
    weights: Mapping[str, PackedWeight]
    parts: Mapping[str, TensorRef]


def is_mlx(config: Mapping[str, Any], tensors: Mapping[str, TensorRef]) -> bool:
    """Return whether mlx-lm wrote and quantized a checkpoint."""
    has_words = any(ref.dtype == "U32" and name.endswith(".weight") for name, ref in tensors.items())
    return has_words and isinstance(config.get("quantization"), dict)


def mlx_tensors(config: Mapping[str, Any], tensors: Mapping[str, TensorRef]) -> MlxTensors:
    """Return the tensors of a checkpoint by the names of Hugging Face. Raises LayoutError."""
    kind, label = config["model_type"], config["quantization"]
    if kind not in _PROJECTIONS:
        raise LayoutError(f"mlx-lm changes tensors of `{kind}`, expected one of {', '.join(sorted(_PROJECTIONS))}")
    plain, parts = dict[str, TensorRef](), dict[str, TensorRef]()
    weights = dict[str, PackedWeight]()
    for name, ref in tensors.items():
        module, _, part = name.rpartition(".")
        if part != "weight" and f"{module}.weight" in tensors and tensors[f"{module}.weight"].dtype == "U32":
            if part not in _PARTS:
                plain[name] = ref  # a bias of the product
            continue
        pieces = _pieces(name, ref, kind)
        if ref.dtype != "U32":
            plain |= pieces
            continue
        bits = _bits(label, module)
        of_parts = {each: tensors.get(f"{module}.{each}") for each in _PARTS}
        for folder_name, of_weight in pieces.items():
            stored = {each: f"{folder_name} {each}" for each in _PARTS}
            for each, of_module in of_parts.items():
                if of_module is None:
                    raise LayoutError(f"`{module}.{each}` is missing, expected scales and biases of affine codes")
                parts[stored[each]] = _matching(of_module, ref, of_weight)
            shapes = {each: parts[stored[each]].shape for each in _PARTS}
            weights[folder_name] = packed_weights.affine(stored, shapes, bits)
    return MlxTensors(plain, weights, parts)


def _bits(label: Mapping[str, Any], module: str) -> int:
    """Return the bits of a module's codes: its own, or those of all. Raises LayoutError."""
    own = label.get(module)
    settings = own if isinstance(own, dict) else label
    bits, mode = settings.get("bits"), settings.get("mode", label.get("mode", "affine"))
    if type(bits) is not int or bits not in _BITS or mode != "affine":
        raise LayoutError(f"`{module}`: expected affine codes of 2 to 8 bits, found {str(bits)[:20]}, {str(mode)[:20]}")
    return bits


def _pieces(name: str, ref: TensorRef, kind: str) -> dict[str, TensorRef]:
    """Return a tensor, or the matrices of a stack of experts, by the names of Hugging Face. Raises LayoutError."""
    before, stack, after = name.partition(_STACK)
    if not stack:
        return {name: ref}
    projection, _, part = after.partition(".")
    known = _PROJECTIONS[kind].get(projection)
    if known is None or len(ref.shape) != 3 or not all(ref.shape):
        raise LayoutError(f"`{name}`: expected a stack of the matrices of all experts, found {list(ref.shape)}")
    return {f"{before}.experts.{at}.{known}.{part}": _one(ref, at) for at in range(ref.shape[0])}


def _one(ref: TensorRef, at: int) -> TensorRef:
    """Return one matrix of a stack."""
    size = ref.size_bytes // ref.shape[0]
    return TensorRef(ref.file, ref.dtype, ref.shape[1:], ref.offset_bytes + at * size, size)


def _matching(part: TensorRef, words: TensorRef, piece: TensorRef) -> TensorRef:
    """Return the part of a weight that belongs to a matrix of its stack. Raises LayoutError."""
    if piece is words:
        return part
    if len(part.shape) != 3 or part.shape[0] != words.shape[0]:
        raise LayoutError(f"expected scales and biases of {words.shape[0]} experts, found {list(part.shape)}")
    return _one(part, (piece.offset_bytes - words.offset_bytes) // piece.size_bytes)
