"""Write a GGUF file of random weights in the shape of a bundle, for llama.cpp: Q4_0, as many bits as the bundle has.

    python -m bench.shapes.gguf_file BUNDLE FILE

Names and settings are those of llama.cpp's converter. The values differ from the bundle's. Their statistics are equal,
so routing is as skewed. Experts of a layer repeat one random matrix, whose rows are turned.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch

from moec.manifests.model import PROJECTIONS, LayerSpec, ModelSpec
from moec.runtime.bundle.open_bundle import open_bundle

from .write import OUTPUT_SCALE, SHARED_DIRECTION

QUANTIZED, PLAIN = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.F32
ARCHITECTURES = {"lfm2_moe": "lfm2moe", "qwen3_5_moe_text": "qwen35moe", "qwen3_moe": "qwen3moe"}
_ATTENTION = {"query": "attn_q", "key": "attn_k", "value": "attn_v", "output": "attn_output"}
_DELTA = {"output_gate": "attn_gate", "rate": "ssm_beta", "step": "ssm_alpha", "output": "ssm_out"}
_OUTPUTS = ("attn_output", "out_proj", "ffn_down", "ffn_down_exps", "ffn_down_shexp", "ssm_out")


class TensorOfFile(NamedTuple):
    """A tensor. shape: rows first. experts: of a stack, 0 without one."""

    name: str
    shape: tuple[int, ...]
    is_plain: bool = False
    experts: int = 0


def tensors(model: ModelSpec) -> Iterator[TensorOfFile]:
    """Yield the tensors of the file in order."""
    hidden = model.hidden_size
    yield TensorOfFile("token_embd.weight", (model.vocab_size, hidden))
    for index, layer in enumerate(model.layers):
        for tensor in _layer(model, layer):
            yield tensor._replace(name=f"blk.{index}.{tensor.name}")
    yield TensorOfFile(f"{'token_embd_norm' if model.family == 'lfm2_moe' else 'output_norm'}.weight", (hidden,), True)
    if not model.tie_embeddings:
        yield TensorOfFile("output.weight", (model.vocab_size, hidden))


def _layer(model: ModelSpec, layer: LayerSpec) -> Iterator[TensorOfFile]:
    hidden, experts = model.hidden_size, layer.experts
    shapes = layer.mixer_shapes(hidden)
    yield TensorOfFile("attn_norm.weight", (hidden,), True)
    is_gated = model.family.startswith("qwen3_5")
    yield TensorOfFile(f"{'post_attention_norm' if is_gated else 'ffn_norm'}.weight", (hidden,), True)
    if layer.attention is not None:
        for name, named in _ATTENTION.items():
            rows, columns = shapes[name]
            doubled = 2 if name == "query" and "output_gate" in shapes else 1
            yield TensorOfFile(f"{named}.weight", (doubled * rows, columns))
        for name in ("attn_q_norm", "attn_k_norm"):
            yield TensorOfFile(f"{name}.weight", (layer.attention.head_size,), True)
    elif layer.convolution is not None:
        yield TensorOfFile("shortconv.conv.weight", (hidden, layer.convolution.taps), True)
        yield TensorOfFile("shortconv.in_proj.weight", shapes["input"])
        yield TensorOfFile("shortconv.out_proj.weight", shapes["output"])
    elif layer.delta is not None:
        delta = layer.delta
        yield TensorOfFile("attn_qkv.weight", (delta.features, hidden))
        for name, named in _DELTA.items():
            yield TensorOfFile(f"{named}.weight", shapes[name])
        yield TensorOfFile("ssm_conv1d.weight", (delta.features, delta.taps), True)
        yield TensorOfFile("ssm_dt.bias", (delta.value_heads,), True)
        yield TensorOfFile("ssm_a", (delta.value_heads,), True)
        yield TensorOfFile("ssm_norm.weight", (delta.value_size,), True)
    yield from _feed_forward(model, layer)
    if experts.count and experts.router.correction:
        yield TensorOfFile("exp_probs_b.bias", (experts.count,), True)


def _feed_forward(model: ModelSpec, layer: LayerSpec) -> Iterator[TensorOfFile]:
    hidden, experts = model.hidden_size, layer.experts
    if experts.count:
        yield TensorOfFile("ffn_gate_inp.weight", (experts.count, hidden), True)
    suffix = "_shexp" if experts.count else ""
    for projection in PROJECTIONS:
        turned = (lambda width: (hidden, width)) if projection == "down" else (lambda width: (width, hidden))
        if experts.count:
            yield TensorOfFile(f"ffn_{projection}_exps.weight", turned(experts.width), experts=experts.count)
        if layer.shared is not None:
            yield TensorOfFile(f"ffn_{projection}{suffix}.weight", turned(layer.shared.width))
    if layer.shared is not None and layer.shared.has_gate:
        yield TensorOfFile("ffn_gate_inp_shexp.weight", (hidden,), True)


def values(tensor: TensorOfFile) -> np.ndarray:
    """Return the numbers of a tensor, of a stack one matrix, float32."""
    last = tensor.name.removesuffix(".weight").rpartition(".")[2]
    if len(tensor.shape) == 1 and last != "ffn_gate_inp_shexp":
        filled = {"ssm_a": -1.0, "bias": 0.0}.get(last, 1.0)
        return np.full(tensor.shape, filled, np.float32)
    generator = torch.Generator().manual_seed(zlib.crc32(tensor.name.encode()))
    matrix = torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5
    if last == "token_embd":
        shared = torch.randn(tensor.shape[-1], generator=torch.Generator().manual_seed(1)) * SHARED_DIRECTION**0.5
        matrix = matrix * tensor.shape[-1] ** 0.5 * (1 - SHARED_DIRECTION) ** 0.5 + shared
    return np.asarray((matrix * OUTPUT_SCALE if last in _OUTPUTS else matrix).numpy())


def settings(model: ModelSpec) -> dict[str, Any]:
    """Return the settings of an architecture by the end of their keys."""
    attention, layer = model.attentions[0], model.layers[-1]
    plain = sum(not each.experts.count for each in model.layers)
    found: dict[str, Any] = {
        "block_count": model.num_layers, "context_length": model.max_positions, "embedding_length": model.hidden_size,
        "feed_forward_length": model.layers[0].shared.width if model.layers[0].shared else layer.experts.width,
        "attention.head_count": attention.num_heads, "attention.layer_norm_rms_epsilon": model.norm_eps,
        "attention.key_length": attention.head_size, "attention.value_length": attention.head_size,
        "rope.freq_base": attention.rope.theta if attention.rope else 1e4, "vocab_size": model.vocab_size,
        "rope.dimension_count": attention.rotary_size, "expert_count": layer.experts.count,
        "expert_used_count": layer.experts.top_k, "expert_feed_forward_length": layer.experts.width,
    }  # fmt: skip
    kv_heads = [each.attention.num_kv_heads if each.attention else 0 for each in model.layers]
    found["attention.head_count_kv"] = kv_heads if model.family == "lfm2_moe" else attention.num_kv_heads
    if model.family == "lfm2_moe":
        taps = next(each.convolution.taps for each in model.layers if each.convolution)
        found |= {"leading_dense_block_count": plain, "expert_gating_func": 2, "shortconv.l_cache": taps}
    delta = next((each.delta for each in model.layers if each.delta), None)
    if delta is not None and layer.shared is not None:
        quarter = attention.rotary_size // 2
        found |= {
            "ssm.conv_kernel": delta.taps, "ssm.inner_size": delta.value_heads * delta.value_size,
            "ssm.state_size": delta.key_size, "ssm.time_step_rank": delta.value_heads,
            "ssm.group_count": delta.key_heads, "expert_shared_feed_forward_length": layer.shared.width,
            "rope.dimension_sections": [quarter - 2 * (quarter // 3), quarter // 3, quarter // 3, 0],
            "full_attention_interval": 4,
        }  # fmt: skip
    return found


def write(bundle: Path, target: Path) -> None:
    """Write the file. One tensor is in memory at a time."""
    with open_bundle(bundle) as opened:
        model = opened.manifest.model
    architecture = ARCHITECTURES[model.family]
    writer = gguf.GGUFWriter(target, architecture)
    for key, value in settings(model).items():
        name = f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    listed = list(tensors(model))
    for tensor in listed:
        whole = (tensor.experts, *tensor.shape) if tensor.experts else tensor.shape
        kind = PLAIN if tensor.is_plain else QUANTIZED
        shape = whole if tensor.is_plain else gguf.quant_shape_to_byte_shape(whole, kind)
        size = int(np.prod(shape)) * (4 if tensor.is_plain else 1)
        dtype = np.dtype(np.float32 if tensor.is_plain else np.uint8)
        writer.add_tensor_info(tensor.name, shape, dtype, size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in listed:
        data = values(tensor)
        if not tensor.is_plain:
            data = gguf.quants.quantize(data, QUANTIZED)
        if tensor.experts:
            data = np.stack([np.roll(data, 7 * expert + 1, axis=0) for expert in range(tensor.experts)])
        writer.write_tensor_data(data)
    writer.close()


def main() -> None:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description="Write a GGUF file of random weights in the shape of a bundle.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    write(options.bundle, options.file)


if __name__ == "__main__":
    main()
