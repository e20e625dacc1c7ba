"""Write the yardstick's weights as a GGUF file in Q4_0.

    python -m bench.yardstick.checkpoint.gguf_model CHECKPOINT FILE

The weights come from the checkpoint that `moec compile` reads. The `gguf` package rounds matrices to Q4_0. Routers and
norms stay float32, as in llama.cpp's converter. There is no vocabulary, because runs get ids. llama-server needs one:
`--vocabulary` takes that of the checkpoint.

`--architecture qwen3moe` is for ik_llama.cpp, which does not support OLMoE. The matrices are the same. Queries and keys
have a norm per head, and the weights of the chosen experts sum to one. A token reads and multiplies the same bytes, but
the outputs differ.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

QUANTIZED = gguf.GGMLQuantizationType.Q4_0
PLAIN = gguf.GGMLQuantizationType.F32
OLMOE, QWEN3MOE = "olmoe", "qwen3moe"
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERT_NAMES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


class Checkpoint:
    """The tensors of a sharded checkpoint by name, float32."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        self._files: dict[str, str] = index["weight_map"]
        self._open: tuple[str, Any] = ("", None)

    def tensor(self, name: str) -> np.ndarray:
        """Return one tensor. Callers visit shards in order, so one is open at a time."""
        file = self._files[name]
        if self._open[0] != file:
            self._open = (file, safe_open(self._folder / file, "pt"))
        tensor: torch.Tensor = self._open[1].get_tensor(name)
        return tensor.to(torch.float32).numpy()


def tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, list[str]]]:
    """Yield GGUF names, and the tensors of the checkpoint that make each. Several tensors are stacked."""
    yield "token_embd", ["model.embed_tokens"]
    for layer in range(checkpoint.config["num_hidden_layers"]):
        for name, source in _LAYER_NAMES.items():
            yield f"blk.{layer}.{name}", [f"model.layers.{layer}.{source}"]
        experts = range(checkpoint.config["num_experts"])
        for name, source in _EXPERT_NAMES.items():
            yield f"blk.{layer}.{name}", [f"model.layers.{layer}.mlp.experts.{expert}.{source}" for expert in experts]
    yield "output_norm", ["model.norm"]
    yield "output", ["lm_head"]


def is_quantized(name: str) -> bool:
    """Return whether a tensor is a matrix other than a router."""
    return not name.endswith(("norm", "ffn_gate_inp"))


class ByHeads(Checkpoint):
    """A checkpoint whose norms of queries and keys are cut to the size of one head."""

    def tensor(self, name: str) -> np.ndarray:
        """Return one tensor. Norms of queries and keys are cut."""
        whole = super().tensor(name)
        head_size = self.config["hidden_size"] // self.config["num_attention_heads"]
        return whole[:head_size] if name.endswith(("q_norm.weight", "k_norm.weight")) else whole


def vocabulary(folder: Path, size: int) -> tuple[list[str], list[gguf.TokenType], list[str]]:
    """Return the tokens of a checkpoint's byte-level BPE, their kinds, and its merges.

    size: rows of the embedding. Rows without a token get a name.
    """
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    by_id = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    special = {merge["id"]: merge["content"] for merge in tokenizer["added_tokens"]}
    tokens = [(by_id | special).get(number, f"<unused{number}>") for number in range(size)]
    kinds = [
        gguf.TokenType.CONTROL
        if number in special
        else gguf.TokenType.NORMAL
        if number in by_id
        else gguf.TokenType.UNUSED
        for number in range(size)
    ]
    return (
        tokens,
        kinds,
        [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]],
    )


def add_vocabulary(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """Add the vocabulary of a checkpoint."""
    tokens, kinds, merges = vocabulary(folder, config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def write(folder: Path, target: Path, architecture: str, has_vocabulary: bool = False) -> None:
    """Write the file. One tensor is in memory at a time."""
    checkpoint = (ByHeads if architecture == QWEN3MOE else Checkpoint)(folder)
    config = checkpoint.config
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if architecture == QWEN3MOE:
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    if has_vocabulary:
        add_vocabulary(writer, folder, config)
    else:
        writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    listed = list(tensors(checkpoint))
    for name, sources in listed:
        shape = checkpoint.tensor(f"{sources[0]}.weight").shape
        whole = (len(sources), *shape) if len(sources) > 1 else shape
        kind = QUANTIZED if is_quantized(name) else PLAIN
        if kind is QUANTIZED:
            whole = gguf.quant_shape_to_byte_shape(whole, kind)
        size = int(np.prod(whole)) * (1 if kind is QUANTIZED else 4)
        dtype = np.dtype(np.uint8 if kind is QUANTIZED else np.float32)
        writer.add_tensor_info(f"{name}.weight", whole, dtype, size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for done, (name, sources) in enumerate(listed, 1):
        parts = [checkpoint.tensor(f"{source}.weight") for source in sources]
        if is_quantized(name):
            parts = [gguf.quants.quantize(matrix, QUANTIZED) for matrix in parts]
        writer.write_tensor_data(np.stack(parts) if len(parts) > 1 else parts[0])
        print(f"{name}: {done} of {len(listed)}", flush=True)
    writer.close()


def main() -> None:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description="Write the yardstick's weights as a Q4_0 GGUF file.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--architecture", choices=(OLMOE, QWEN3MOE), default=OLMOE)
    parser.add_argument("--vocabulary", action="store_true", help="add the vocabulary, which llama-server needs")
    options = parser.parse_args()
    write(options.checkpoint, options.file, options.architecture, options.vocabulary)


if __name__ == "__main__":
    main()
