"""The checkpoint as a transformers model: how it is loaded, and its forward pass over batches of token rows.

Shapes: B rows, T tokens of a row, D hidden, V vocabulary, E experts, K top-k, N = tokens of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, Cache, DynamicCache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils import logging as transformers_logging

from moec.manifests.errors import CheckpointError

from ..families import Lowering
from ..families.lowering import TensorSource

TOKENS_PER_FORWARD = 2048
"""Tokens of one forward pass. More tokens are slower on a CPU, because their activations exceed the cache."""
LOGITS_PER_CHUNK = 1 << 24
"""Number of logits held at once (64 MiB), where only the maximum or one entry of each row is needed."""
_EXPERTS_IMPLEMENTATION = "moec_sorted"
TORCH_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_FOREIGN_ERRORS = (
    OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError, SafetensorError,
    StrictDataclassError,
)  # fmt: skip


@dataclass(frozen=True)
class Network:
    """A loaded model.

    model: the transformers model.
    backbone: maps tokens to hidden states.
    head: maps hidden states to unscaled logits.
    experts: layer -> its module with the fused `gate_up_proj` and `down_proj`.
    parameters: canonical name of a dense weight -> the model's parameter, and its part in that parameter.
    vocab_size: V.
    logits_scale: factor of the logits.
    """

    model: Any
    backbone: Any
    head: Any
    experts: dict[int, Any]
    parameters: Mapping[str, tuple[str, TensorSource]]
    vocab_size: int
    logits_scale: float = 1.0

    def hidden(self, rows: Sequence[Sequence[int]], cache: Any = None, prompts: Sequence[Sequence[int]] = ()) -> Tensor:
        """Return final hidden states of the rows, [B, T, D] with T the longest row.

        Shorter rows are padded on the right. The causal mask hides padding from real tokens. States at padding are
        undefined.
        cache: a cache of `new_cache` to fill, or None.
        prompts: tokens of each row for an encoder, if the model has one.
        """
        return self._states(cache, input_ids=padded(rows)[0], use_cache=cache is not None)

    def new_cache(self) -> Any:
        """Return a cache for `hidden` to fill."""
        return DynamicCache()

    def row_states(self, cache: Any, row: int, kept: int, prompt: int) -> tuple[RowStates, RowStates]:
        """Return keys and values of one row: of its first `kept` tokens, and of the encoder's `prompt` tokens."""
        return [kept_states(layer, row, kept) for layer in cache.layers], []

    def decoding_cache(self, layers: list[Any], prompts: Sequence[RowStates]) -> Any:
        """Return the cache of rows that are decoded together.

        layers: caches of the rows' own tokens.
        prompts: second result of `row_states`, per row.
        """
        return Cache(layers=layers)

    def keep_rows(self, cache: Any, keep: Tensor) -> None:
        """Drop all other rows from the prompts of a decoding cache. The caller handles its `layers`."""

    def step(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Return hidden states [B, D] of one more token per row.

        tokens, positions: [B].
        mask: [B, cached + 1] of 0 and 1.
        """
        states = self._states(
            cache,
            input_ids=tokens.unsqueeze(1),
            position_ids=positions.unsqueeze(1),
            attention_mask=mask,
            use_cache=True,
        )
        return states[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, V] float32."""
        logits: Tensor = self.head(hidden)
        return logits if self.logits_scale == 1.0 else logits * self.logits_scale

    def logit_chunks(self, hidden: Tensor) -> Iterator[Tensor]:
        """Yield the rows of `logits(hidden)` in bounded pieces."""
        for piece in torch.split(hidden, max(1, LOGITS_PER_CHUNK // self.vocab_size)):
            yield self.logits(piece)

    def best(self, hidden: Tensor) -> list[int]:
        """Return the most likely next token of each row of [N, D]."""
        return [token for chunk in self.logit_chunks(hidden) for token in chunk.argmax(-1).tolist()]

    def _states(self, cache: Any, **inputs: Any) -> Tensor:
        """Return final hidden states [B, T, D] of the backbone.

        cache: keys and values to extend, or None.
        """
        states: Tensor = self.backbone(**{cache_argument(self.backbone): cache}, **inputs).last_hidden_state
        return states


def cache_argument(module: Any) -> str:
    """Return the name under which the forward pass of a transformers module takes its cache.

    Releases of transformers before 5.24 call it `past_key_values`. Later ones warn about that name.
    """
    return "cache" if "cache" in signature(module.forward).parameters else "past_key_values"


RowStates = list[tuple[Tensor, Tensor]]
"""Keys and values of one row in each layer, [H, T, head size]."""


def kept_states(layer: Any, row: int, kept: int) -> tuple[Tensor, Tensor]:
    """Return a copy of the first `kept` positions of one row of a layer's cache."""
    return layer.keys[row, :, :kept].clone(), layer.values[row, :, :kept].clone()


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return token ids [B, T] with zeros on the right, and a mask of real tokens, [B, T] of 0 and 1."""
    width = max(len(row) for row in rows)
    ids, real = torch.zeros((len(rows), width), dtype=torch.long), torch.zeros((len(rows), width), dtype=torch.long)
    for at, row in enumerate(rows):
        ids[at, : len(row)], real[at, : len(row)] = torch.tensor(row, dtype=torch.long), 1
    return ids, real


def length_batches(lengths: Sequence[int], tokens: int, max_rows: int | None = None) -> list[list[int]]:
    """Group indices into batches of similar length, longest first.

    A batch has at most `tokens` tokens, padding included, and at most `max_rows` rows. A longer row forms its own
    batch.
    Ties keep the input order.
    """
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        full = not batches or (len(batches[-1]) + 1) * width > tokens or len(batches[-1]) == max_rows
        if full:
            batches.append([])
            width = lengths[index]
        batches[-1].append(index)
    return batches


def load_network(lowering: Lowering) -> Network:
    """Load with the checkpoint's own 16-bit weights in float32 arithmetic.

    Raises CheckpointError if transformers cannot build the model, or if a weight is missing or has another shape.
    """
    model = load_model(lowering, AutoModelForCausalLM)
    return network_of(model, lowering, list(lowering.model.expert_layers))


def load_model(lowering: Lowering, loader: Any) -> Any:
    """Return the transformers model of a checkpoint, with its own 16-bit weights in float32.

    loader: an AutoModel class.
    Raises CheckpointError like `load_network`.
    """
    root = lowering.checkpoint.root
    with quiet_transformers(root, "load the model"):
        model, report = loader.from_pretrained(
            root, dtype=torch.float32, local_files_only=True, output_loading_info=True, **_unpacking(lowering)
        )
    faults = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if faults:
        raise CheckpointError(
            f"`{root}`: {len(faults)} weights are missing or have another shape, first `{faults[0]}`",
            "copy the checkpoint again",
        )
    model.float()  # releases of transformers before 5.23 unpack MXFP4 weights to bfloat16, whatever `dtype` says
    _round_to_16_bits(model, lowering)
    return model


def _unpacking(lowering: Lowering) -> dict[str, Any]:
    """Return the arguments that make transformers unpack MXFP4 weights.

    The arithmetic of transformers on packed weights differs from moec's.
    """
    if lowering.checkpoint.config.get("quantization_config") is None:
        return {}
    from transformers.utils.quantization_config import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def network_of(model: Any, lowering: Lowering, expected: list[int]) -> Network:
    """Return the model with `sorted_experts` as its forward pass of experts.

    expected: layers that must hold routed experts.
    Raises CheckpointError if other layers hold them.
    """
    model.eval().requires_grad_(False)
    experts = _find_experts(model)
    if sorted(experts) != expected:
        raise CheckpointError(
            f"`{lowering.checkpoint.root}`: {len(experts)} layers of `{type(model).__name__}` hold routed experts as "
            f"expected, not {len(expected)}",
            "install a release of transformers that pyproject.toml allows",
        )
    if all(_is_plain(module) for module in experts.values()):
        ALL_EXPERTS_FUNCTIONS.register(_EXPERTS_IMPLEMENTATION, sorted_experts)
        model.set_experts_implementation(_EXPERTS_IMPLEMENTATION)
    parameters = {name: (lowering.loaded[name], source) for name, source in lowering.dense.items()}
    head, spec = model.get_output_embeddings(), lowering.model
    return Network(model, model.get_decoder(), head, experts, parameters, spec.vocab_size, spec.logits_scale)


def sorted_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute routed experts with one product per expert: hidden [N, D], index and weights [N, K] -> [N, D].

    It replaces the loop of transformers and gives 8 to 14 % more tokens/s at 2,048 tokens and 8 experts. The
    contributions
    of a token are added in the order of its top-k.
    """
    top_k = top_k_index.shape[-1]
    chosen = top_k_index.reshape(-1)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=module.num_experts).tolist()
    rows = hidden_states.index_select(0, order // top_k)
    outputs = torch.empty_like(rows)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            piece = slice(start, start + count)
            gated = module._apply_gate(functional.linear(rows[piece], module.gate_up_proj[expert]))
            torch.mm(gated, module.down_proj[expert].T, out=outputs[piece])
            start += count
    outputs.mul_(top_k_weights.reshape(-1)[order].unsqueeze(-1))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    return outputs.index_select(0, place).view(len(hidden_states), top_k, -1).sum(1)


def _is_plain(module: Any) -> bool:
    """Return whether `sorted_experts` fits the module: gated, without biases, weights [outputs, inputs]."""
    plain = not module.has_bias and not module.is_transposed and module.has_gate
    return bool(plain and not module.has_post_expert_norm and not module._is_expert_parallel)


def _find_experts(model: Any) -> dict[int, Any]:
    found = {}
    for name, module in model.named_modules():
        match = _LAYER.search(name)
        if match and name.endswith(".experts") and hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
            found[int(match[1])] = module
    return found


def _round_to_16_bits(model: Any, lowering: Lowering) -> None:
    """Round float32 weights of the checkpoint to the type that the bundle stores."""
    if any(ref.dtype == "F32" for ref in lowering.checkpoint.tensors.values()):
        stored = set(lowering.loaded.values())
        for name, parameter in model.named_parameters():
            if name in stored or ".experts." in name:  # router corrections keep float32
                parameter.data.copy_(parameter.data.to(TORCH_TYPES[lowering.float_type]))


@contextmanager
def quiet_transformers(root: Path, what: str) -> Iterator[None]:
    """Silence progress bars and warnings of transformers, and turn its errors into CheckpointError.

    what: the action in the error message: transformers cannot `what`.
    """
    settings: Any = transformers_logging
    bars, level = settings.is_progress_bar_enabled(), settings.get_verbosity()
    settings.disable_progress_bar()
    settings.set_verbosity_error()
    try:
        yield
    except _FOREIGN_ERRORS as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"`{root}`: transformers cannot {what}: {reason}", "check that the folder is complete"
        ) from error
    finally:
        settings.set_verbosity(level)
        if bars:
            settings.enable_progress_bar()
