"""Formats of other engines: bits, shapes that they fit, and the format of ours that stands in for each.

From 256 columns on, a stand-in has the bits of the engine's format within 0.13 bits per weight. A measurement of a plan
quantizes with stand-ins, because the engines' own quantizers are not part of moec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moec.manifests.quant import QuantSpec

LLAMA_CPP = "llama.cpp"
MLX = "mlx"
GPTQMODEL = "gptqmodel"
ENGINES = (LLAMA_CPP, MLX, GPTQMODEL)

_MXFP4 = "mxfp4"
_SUPER_BLOCK, _BLOCK = 256, 32
_LLAMA_CPP_TYPES: tuple[tuple[str, float, int, str, bool], ...] = (
    ("iq1_s", 1.5625, _SUPER_BLOCK, "q1.6s", True),
    ("iq1_m", 1.75, _SUPER_BLOCK, "q1.6g128s", True),
    ("iq2_xxs", 2.0625, _SUPER_BLOCK, "q2g128b", True),
    ("iq2_xs", 2.3125, _SUPER_BLOCK, "q2g64b", True),
    ("iq2_s", 2.5625, _SUPER_BLOCK, "q2g32b", True),
    ("iq3_xxs", 3.0625, _SUPER_BLOCK, "q3g128b", True),
    ("iq3_s", 3.4375, _SUPER_BLOCK, "q3g32b", False),
    ("iq4_xs", 4.25, _SUPER_BLOCK, "q4g64b", False),
    ("q4_k", 4.5, _SUPER_BLOCK, "q4g32b", False),
    ("iq4_nl", 4.5, _BLOCK, "q4g32b", False),
    ("q5_k", 5.5, _SUPER_BLOCK, "q5g32b", False),
    ("q5_0", 5.5, _BLOCK, "q5g32b", False),
    ("q6_k", 6.5625, _SUPER_BLOCK, "q6g32s", False),
    ("q8_0", 8.5, _BLOCK, "q8g32s", False),
)
"""Name, bits per weight, columns of a block, stand-in, and whether llama-quantize refuses the type without importance
data. The choice is one type for each size. Ternary types are left out: they are for models that were trained so.
Sources: ggml's block sizes (gguf-py, constants.py); llama.cpp, src/llama-quant.cpp, tensor_requires_imatrix."""
_LLAMA_CPP_16_BITS = {"bfloat16": "bf16", "float16": "f16"}

_MLX_GROUPS = {2: (128, 64, 32), 3: (128, 64, 32), 4: (128, 64, 32), 5: (64,), 6: (64,), 8: (64,)}
"""Group sizes on offer by bitwidth. MLX stores a scale and a minimum of 16 bits per group, as in our `q4g64`."""
_MLX_MXFP4 = {"group_size": 32, "bits": 4, "mode": _MXFP4}

GPTQMODEL_BITS = (2, 3, 4, 8)
"""Bitwidths of GPTQ's usual checkpoint format. 5, 6 and 7 need another one, which few engines read."""
_GPTQMODEL_GROUP = 128
"""Group size of a matrix whose bitwidth GPTQModel does not have."""
_SYMMETRIC_FROM = 4
"""Least bitwidth without minima. The fast kernels of 4 and 8 bits have none, and at 2 and 3 bits they gain much."""


@dataclass(frozen=True, slots=True)
class EngineFormat:
    """A format of another engine.

    name: its name in tables, and in files of llama.cpp.
    bits: stored bits of a weight, with scales.
    columns: a matrix must have a multiple of so many columns.
    stand_in: the format of ours that is measured in its place.
    settings: values of the engine's configuration. Empty in llama.cpp, and for weights that are not quantized.
    needs_importance: whether llama-quantize refuses the type without `--imatrix`.
    """

    name: str
    bits: float
    columns: int
    stand_in: QuantSpec
    settings: Mapping[str, object] = field(default_factory=dict)
    needs_importance: bool = False

    def fits(self, columns: int) -> bool:
        """Return whether a matrix with so many columns can have this format, and so can its stand-in."""
        return columns % self.columns == 0 and self.stand_in.fits(columns)

    def bytes_of(self, rows: int, columns: int) -> float:
        """Return the bytes of a matrix."""
        return rows * columns * self.bits / 8

    @property
    def is_quantized(self) -> bool:
        """False if the weight keeps its 16 bits."""
        return self.stand_in.bitwidth != 16


def offered_formats(engine: str, plain: QuantSpec, has_mxfp4: bool) -> tuple[EngineFormat, ...]:
    """Return the formats of an engine with one format per stack of experts, fewest bits first.

    plain: the format of weights that keep 16 bits.
    has_mxfp4: whether the checkpoint's own experts are MXFP4, which then is offered as it is.
    """
    formats = _llama_cpp_formats(plain) if engine == LLAMA_CPP else _mlx_formats(plain)
    if has_mxfp4:
        settings = _MLX_MXFP4 if engine == MLX else {}
        formats.append(EngineFormat(_MXFP4, 4.25, _BLOCK, QuantSpec.parse(_MXFP4), settings))
    return tuple(sorted(formats, key=lambda engine_format: engine_format.bits))


def _llama_cpp_formats(plain: QuantSpec) -> list[EngineFormat]:
    formats = [
        EngineFormat(name, bits, columns, QuantSpec.parse(stand_in), needs_importance=needs_importance)
        for name, bits, columns, stand_in, needs_importance in _LLAMA_CPP_TYPES
    ]
    return [*formats, EngineFormat(_LLAMA_CPP_16_BITS[plain.float_type], 16, 1, plain)]


def _mlx_formats(plain: QuantSpec) -> list[EngineFormat]:
    formats = []
    for bits, groups in _MLX_GROUPS.items():
        for group in groups:
            settings = {"group_size": group, "bits": bits}
            formats.append(EngineFormat(f"{bits}g{group}", bits + 32 / group, group, QuantSpec(bits, group), settings))
    return [*formats, EngineFormat(str(plain), 16, 1, plain)]


def gptqmodel_format(spec: QuantSpec, columns: int, plain: QuantSpec) -> EngineFormat:
    """Return GPTQModel's format with the bits and the group size of one of ours.

    Without that bitwidth it has the next larger one, in groups of 128 columns if they fit.
    spec: a format that stores weights.
    """
    if spec.bitwidth == 16:
        return EngineFormat(str(plain), 16, 1, plain)
    bits = next(width for width in GPTQMODEL_BITS if width >= spec.bitwidth)
    group = spec.group_size
    if bits != spec.bitwidth:
        group = next((size for size in (_GPTQMODEL_GROUP, 64, 32) if columns % size == 0), 0)
    is_symmetric = bits >= _SYMMETRIC_FROM
    settings = {"bits": bits, "group_size": group or -1, "sym": is_symmetric}
    # Each group has a scale of 16 bits and a zero point of the bitwidth.
    stored = bits + (16 + bits) / (group or columns)
    stand_in = QuantSpec(bits, group, is_symmetric, byte_scales=group > 0 and not is_symmetric)
    return EngineFormat(f"{bits}g{group}" if group else f"{bits}", stored, group or 1, stand_in, settings)
