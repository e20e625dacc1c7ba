"""The GGUF file as tensors and a tokenizer with the names of Hugging Face's Llama."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_CONTROL = 3


class GgufModel:
    """An opened GGUF file of architecture `llama` with a byte-level tokenizer."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        self.layers = self.field("llama.block_count")
        self.hidden = self.field("llama.embedding_length")
        self.width = self.field("llama.feed_forward_length")
        self.heads = self.field("llama.attention.head_count")
        self.kv_heads = self.field("llama.attention.head_count_kv")
        self.context = self.field("llama.context_length")
        self.theta = float(self.field("llama.rope.freq_base"))
        self.epsilon = round(float(self.field("llama.attention.layer_norm_rms_epsilon")), 9)
        self.vocabulary = self.field("llama.vocab_size")
        self.end_token = self.field("tokenizer.ggml.eos_token_id")
        self.chat_template = self.field("tokenizer.chat_template")

    def field(self, name: str) -> Any:
        """Return a value of the header."""
        return self._reader.fields[name].contents()

    def tensors(self) -> dict[str, Tensor]:
        """Return the float32 weights, by the names of Hugging Face's Llama."""
        return dict(self._named(tensor) for tensor in self._reader.tensors)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer: single digits, then bytes, then merges."""
        texts, kinds = self.field("tokenizer.ggml.tokens"), self.field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE({text: at for at, text in enumerate(texts)}, merges))
        digits, pieces = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
        tokenizer.decoder = decoders.ByteLevel()
        special = [text for text, kind in zip(texts, kinds, strict=True) if kind == _CONTROL]
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        return tokenizer

    def _named(self, tensor: Any) -> tuple[str, Tensor]:
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        parts = tensor.name.removesuffix(".weight").split(".")
        if parts[0] != "blk":
            return {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]], values
        if parts[2] in ("attn_q", "attn_k"):
            values = _split_halves(values, self.heads if parts[2] == "attn_q" else self.kv_heads)
        return f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.weight", values


def _split_halves(weight: Tensor, heads: int) -> Tensor:
    """Undo GGUF's order of rows, where the two halves of a head's rotation alternate. weight: [heads * size, D]."""
    size = len(weight) // heads
    return weight.view(heads, size // 2, 2, -1).transpose(1, 2).reshape(weight.shape)
