"""A whole checkpoint in transformers, with float32 arithmetic: what the product is compared with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, Mxfp4Config

from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.checkpoint.stand_ins import is_stood_in, read_config
from moec.compiler.checkpoint.tokenizer import load_tokenizer
from moec.compiler.families import Lowering, lower
from moec.compiler.reference.build_model import build_model
from moec.compiler.reference.expert_module import projection_of
from moec.compiler.reference.routed_layers import RoutedLayer
from moec.compiler.reference.routers import RouterMasks
from moec.compiler.walker.loaded_layer import WeightName
from moec.compiler.walker.texts import divided_pairs, padded
from moec.evaluation.engine import AnswerScore, Take
from moec.evaluation.text_pairs import TokenPair, encode_pairs, forced_rows
from moec.manifests.model import UnitKey

_TEXTS_AT_ONCE = 32
_LAYER = re.compile(r"(?:^|\.)(layers|encoder\.block|decoder\.block)\.(\d+)\.")


class TransformersOracle:
    """Computes logits. Weights can be exchanged.

    model: the ModelSpec.
    network: the model of transformers.
    experts: layer -> the module that is called with hidden states, chosen experts and weights.
    """

    def __init__(self, folder: Path) -> None:
        self.lowering = lower(open_checkpoint(str(folder)))
        self.model = self.lowering.model
        self._tokenizer = load_tokenizer(folder)
        self.network = _loaded(self.lowering).eval().requires_grad_(False)
        self.network.set_input_embeddings(self.network.get_input_embeddings())  # one for encoder and decoder
        self.experts: dict[int, Any] = {}
        for name, module in list(self.network.named_modules()):
            match = _LAYER.search(name)
            if match is None:
                continue
            layer = int(match[2]) + (self.model.first_decoder_layer if match[1].startswith("decoder") else 0)
            if self.model.encoder is not None and name.endswith(".mlp") and hasattr(module, "experts"):
                routed = RoutedLayer(module, has_capacity=match[1].startswith("encoder"))
                self.network.get_submodule(name.rpartition(".")[0]).mlp = routed
                self.experts[layer] = routed.experts
            elif name.endswith(".experts") and hasattr(module, "gate_up_proj"):
                self.experts[layer] = module
        if is_stood_in(self.lowering.checkpoint):
            for key in (*self.lowering.dense, *self.lowering.units):
                source = self.lowering.unit(key) if isinstance(key, UnitKey) else self.lowering.dense_weight(key)
                self.view(key).copy_(source.reshape(self.view(key).shape))

    # -- text ----------------------------------------------------------------------------------------------------------

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[TokenPair]:
        """Return the tokens of prompts and answers."""
        return encode_pairs(self._tokenizer, pairs, is_joint=self.model.encoder is None)

    def logits(self, row: Sequence[int], prompt: Sequence[int] = ()) -> Tensor:
        """Return the logits [T, V] of a text. prompt: what an encoder reads."""
        return self.batch_logits([row], [prompt] if prompt else [])[0]

    def batch_logits(self, rows: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits [B, T, V] of texts. Those at padding, on the right, have no meaning."""
        text = {"input_ids": padded(rows)[0]}
        if prompts:
            ids, real = padded(prompts)
            text = {"input_ids": ids, "attention_mask": real, "decoder_input_ids": text["input_ids"]}
        found: Tensor = self.network(**text, use_cache=False).logits
        return found

    def forced_logits(self, pairs: Sequence[TokenPair], with_end: bool = True) -> list[np.ndarray]:
        """Return the logits [A, V] that predict the tokens of each answer, and the end token."""
        prompts, decoded = divided_pairs(self.model, pairs)
        rows, _, counts = forced_rows(decoded, self.model.eos_token_ids[:1] if with_end else ())
        found: list[np.ndarray] = []
        for start in range(0, len(rows), _TEXTS_AT_ONCE):
            some = slice(start, start + _TEXTS_AT_ONCE)
            for logits, row, count in zip(
                self.batch_logits(rows[some], prompts[some]), rows[some], counts[some], strict=True
            ):
                found.append(logits[len(row) - count : len(row)].numpy())
        return found

    def answer_log_probs(self, pairs: Sequence[tuple[str, str]], take: Take[AnswerScore]) -> None:
        """See TextEngine."""
        encoded = self.encode_pairs(pairs)
        rows = self.forced_logits(encoded, with_end=False)
        for index, ((_, answer), logits) in enumerate(zip(encoded, rows, strict=True)):
            log_p = torch.from_numpy(logits).double().log_softmax(-1)
            tokens = torch.tensor(answer[len(answer) - len(logits) :], dtype=torch.long).unsqueeze(1)
            take(index, AnswerScore(-float(log_p.gather(1, tokens).sum()), len(logits)))

    # -- weights -------------------------------------------------------------------------------------------------------

    def view(self, name: WeightName) -> Tensor:
        """Return the memory that transformers computes with, shaped like TensorSource.view."""
        if isinstance(name, UnitKey):
            return projection_of(self.experts[name.layer], name.expert, name.projection)
        source, loaded = self.lowering.dense[name], self.network.get_parameter(self.lowering.loaded[name]).data
        if source.rows is not None and loaded.shape[0] == source.shape[0]:  # here too several weights share a matrix
            loaded = loaded[slice(*source.rows)]
        return source.view(loaded)

    def weight(self, name: WeightName) -> Tensor:
        """Return a copy of a weight, [N, K] or a vector."""
        view = self.view(name)
        return (view if isinstance(name, UnitKey) else self.lowering.dense[name].matrix(view)).clone()

    @contextmanager
    def weights(self, weights: Mapping[Any, Tensor]) -> Iterator[None]:
        """Compute with these weights. A unit without columns stands for an expert that its router leaves out."""
        before = {name: self.view(name).clone() for name in weights}
        left_out: dict[int, set[int]] = {}
        for name, weight in weights.items():
            if isinstance(name, UnitKey) and not weight.shape[1]:
                left_out.setdefault(name.layer, set()).add(name.expert)
            else:
                self.view(name).copy_(weight.reshape(before[name].shape))
        masks = RouterMasks(self.network)
        for layer, experts in left_out.items():
            masks.leave_out(self.lowering.loaded[f"layers.{layer}.router"], experts)
        try:
            yield
        finally:
            for layer in left_out:
                masks.leave_out(self.lowering.loaded[f"layers.{layer}.router"], ())
            for name, own in before.items():
                self.view(name).copy_(own)


def _loaded(lowering: Lowering) -> Any:
    """Return the model of transformers, or the stand-in of a family that transformers lacks."""
    checkpoint = lowering.checkpoint
    if is_stood_in(checkpoint):
        return build_model(read_config(checkpoint), checkpoint)
    loader: Any = AutoModelForCausalLM if lowering.model.encoder is None else AutoModelForSeq2SeqLM
    is_packed = checkpoint.config.get("quantization_config") is not None
    unpacking = {"quantization_config": Mxfp4Config(dequantize=True)} if is_packed else {}
    return loader.from_pretrained(checkpoint.root, dtype=torch.float32, **unpacking).float()
