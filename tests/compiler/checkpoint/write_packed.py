"""Quantize a checkpoint with the original tools, in a process of its own.

    python write_packed.py TOOLS CHECKPOINT OUT

TOOLS is a folder with auto-gptq, autoawq and compressed-tensors, which `make quantization-tools` fills. OUT/LAYOUT gets
a quantized checkpoint of each layout. `expected.st` in it has the weights as the tool itself decodes them.
The packages do not import as a whole with today's transformers, so only the modules are imported that are needed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

warnings.filterwarnings("ignore")
GROUP = 32
EXPERT = re.compile(r"(.*\.(?:experts\.\d+|self_attn)\.\w+_proj)\.weight")
Made = tuple[dict[str, Tensor], Tensor]
"""The parts of a weight by suffix, and the weight that the tool decodes."""


def hollow(name: str) -> None:
    """Let modules of a package be imported without its own `__init__`, which fails."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations is not None
    package = types.ModuleType(name)
    package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations)
    sys.modules[name] = package


def gptq(weight: Tensor, bits: int, sym: bool, act_order: bool) -> Made:
    """AutoGPTQ's own GPTQ and its own packing."""
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear
    from auto_gptq.quantization.gptq import GPTQ

    torch.cuda.synchronize = lambda *_: None
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False).half()
    linear.weight.data = weight.half()
    solver = GPTQ(linear.float())
    solver.quantizer.configure(bits, perchannel=True, sym=sym, mse=False)
    solver.add_batch(torch.randn(1, 200, weight.shape[1]), None)
    scale, zero, order = solver.fasterquant(percdamp=0.01, group_size=GROUP, actorder=act_order, static_groups=False)
    packed = QuantLinear(bits, GROUP, weight.shape[1], weight.shape[0], False, weight_dtype=torch.float16)
    packed.pack(linear.half(), scale.half(), zero.half(), order.int())
    decoded = packed(torch.eye(weight.shape[1], dtype=torch.float16)).T
    names = ("qweight", "qzeros", "scales", "g_idx")
    return {name: getattr(packed, name) for name in names}, decoded


def gptq_v2(weight: Tensor) -> Made:
    """The second version of the format: zeros are stored as they are."""
    parts, decoded = gptq(weight, 4, sym=True, act_order=False)
    return {**parts, "qzeros": parts["qzeros"] + 0x11111111}, decoded


def awq(weight: Tensor) -> Made:
    """AutoAWQ's packing of rounded weights."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    grouped = weight.float().reshape(len(weight), -1, GROUP)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    rounded = (grouped / scales[..., None].float()).round() + zeros[..., None]
    linear.weight.data = ((rounded.clamp(0, 15) - zeros[..., None]) * scales[..., None].float()).reshape(weight.shape)
    packed = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    names = ("qweight", "qzeros", "scales")
    decoded = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP).T
    return {name: getattr(packed, name) for name in names}, decoded


def compressed(weight: Tensor, bits: int, sym: bool, kind: str, strategy: str) -> Made:
    """compressed-tensors: its scales, its rounding, its packing."""
    from compressed_tensors.compressors import NaiveQuantizationCompressor, PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    own = weight.bfloat16()
    group = {"group_size": GROUP} if strategy == "group" else {}
    args = QuantizationArgs(num_bits=bits, type=kind, symmetric=sym, strategy=strategy, **group)
    parted = own.reshape(len(own), -1, GROUP if strategy == "group" else own.shape[1])
    scale, zero = calculate_qparams(parted.amin(-1), parted.amax(-1), args)
    state = {"weight": own, "weight_scale": scale.bfloat16(), "weight_zero_point": zero}
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    tool = PackedQuantizationCompressor if kind == "int" and bits == 4 else NaiveQuantizationCompressor
    made = tool.compress(state, scheme)
    return made, tool.decompress(made, scheme)["weight"]


def mxfp4(weight: Tensor) -> Made:
    """compressed-tensors: 4-bit floats in blocks of 32, with exponents as bytes."""
    from compressed_tensors.compressors import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import MXFP4A16
    from compressed_tensors.quantization.utils import calculate_qparams

    args, own = MXFP4A16["weights"], weight.bfloat16()
    parted = own.reshape(len(own), -1, 32)
    scale, _ = calculate_qparams(parted.amin(-1), parted.amax(-1), args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    made = MXFP4PackedCompressor.compress({"weight": own, "weight_scale": scale.bfloat16()}, scheme)
    return made, MXFP4PackedCompressor.decompress(made, scheme)["weight"]


def nvfp4(weight: Tensor) -> Made:
    """compressed-tensors: 4-bit floats in blocks of 16, whose scales are 8-bit floats and share a divisor."""
    from compressed_tensors.compressors import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4A16
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args, own = NVFP4A16["weights"], weight.bfloat16()
    parted = own.reshape(len(own), -1, 16)
    divisor = generate_gparam(own.min(), own.max())
    scale, _ = calculate_qparams(parted.amin(-1), parted.amax(-1), args, divisor)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": own, "weight_scale": scale, "weight_global_scale": divisor}
    made = NVFP4PackedCompressor.compress(state, scheme)
    return made, NVFP4PackedCompressor.decompress(made, scheme)["weight"]


def nvfp4_modelopt(weight: Tensor) -> Made:
    """The layout of ModelOpt, written from that of compressed-tensors: other names, and a factor for a divisor."""
    made, _ = nvfp4(weight)
    factor = 1 / made["weight_global_scale"].float().reshape(())
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.stack([made["weight_packed"] & 15, made["weight_packed"] >> 4], -1).flatten(1).long()
    values = torch.where(codes < 8, 1.0, -1.0) * magnitudes[codes % 8]
    each = (made["weight_scale"].float() * factor).repeat_interleave(16, 1)
    parts = {"weight": made["weight_packed"], "weight_scale": made["weight_scale"], "weight_scale_2": factor}
    return {**parts, "input_scale": torch.tensor(1.0)}, values * each


def fp8_blocks(weight: Tensor, scale_type: torch.dtype) -> Made:
    """Blocks as DeepSeek-V3 publishes them, with torch's own type. ue8m0 scales are powers of two."""
    rows, columns = weight.shape
    block = 32
    grid = weight.float().reshape(rows // block, block, columns // block, block)
    scale = grid.abs().amax((1, 3)) / 448
    if scale_type == torch.float8_e8m0fnu:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    stored = scale.to(scale_type)
    coded = (grid / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    decoded = (coded.float() * scale[:, None, :, None]).reshape(rows, columns)
    return {"weight": coded.reshape(rows, columns), "weight_scale_inv": stored}, decoded.bfloat16()


LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Made]]] = {
    **{
        f"gptq-{bits}": ({"quant_method": "gptq", "bits": bits}, lambda w, bits=bits: gptq(w, bits, False, False))
        for bits in (2, 3, 4, 8)
    },
    "gptq-act-order": ({"quant_method": "gptq", "desc_act": True}, lambda w: gptq(w, 4, True, True)),
    "gptq-v2": ({"quant_method": "gptq", "checkpoint_format": "gptq"}, gptq_v2),
    "awq": ({"quant_method": "awq"}, awq),
    "ct-int4": ({"quant_method": "compressed-tensors"}, lambda w: compressed(w, 4, True, "int", "group")),
    "ct-int4-zeros": ({"quant_method": "compressed-tensors"}, lambda w: compressed(w, 4, False, "int", "group")),
    "ct-int8": ({"quant_method": "compressed-tensors"}, lambda w: compressed(w, 8, True, "int", "channel")),
    "ct-fp8": ({"quant_method": "compressed-tensors"}, lambda w: compressed(w, 8, True, "float", "channel")),
    "ct-mxfp4": ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, mxfp4),
    "ct-nvfp4": ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, nvfp4),
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4_modelopt),
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        lambda w: fp8_blocks(w, torch.float32),
    ),
    "fp8-ue8m0": (
        {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
        lambda w: fp8_blocks(w, torch.float8_e8m0fnu),
    ),
}


def main(tools: str, source: str, target: str) -> None:
    """Write a quantized checkpoint of each layout."""
    sys.path.append(tools)
    for name in ("auto_gptq", "awq"):
        hollow(name)
    for layout in LAYOUTS:
        write(Path(source), Path(target) / layout, layout)


def write(folder: Path, out: Path, layout: str) -> None:
    """Write one quantized checkpoint."""
    torch.manual_seed(0)
    settings, quantize = LAYOUTS[layout]
    shutil.copytree(folder, out)
    tensors, made, expected = load_file(folder / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            made[name] = tensor
            continue
        parts, expected[name] = quantize(tensor.float())
        made |= {f"{match[1]}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(made, out / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, out / "expected.st")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


if __name__ == "__main__":
    main(*sys.argv[1:])
