"""The reference model with an encoder. The encoder reads each prompt once. Rows are the decoder's text.

Capacity is counted in the encoder alone, as in generation. A decoder pass over a whole answer must route each token
like a token that is decoded alone.
Shapes: B rows, S tokens of a prompt, T tokens of a row, D hidden, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSeq2SeqLM, Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from moec.evaluation.text_pairs import TokenPair
from moec.manifests.errors import CheckpointError, InputError
from moec.manifests.model import ModelSpec

from ..families import Lowering
from .expert_module import SeparateExperts
from .network import Network, RowStates, kept_states, load_model, padded

_ROUTED = re.compile(r"^(encoder|decoder)\.block\.(\d+)\.layer\.\d+\.mlp$")
_NO_CAPACITY = 1 << 62


def divided_pairs(model: ModelSpec, pairs: Sequence[TokenPair]) -> tuple[list[list[int]], list[TokenPair]]:
    """Split each pair into the tokens for an encoder and the pair for the decoder.

    Without an encoder its tokens are empty, and the pairs do not change.
    Raises InputError if an encoder's prompt is empty.
    """
    if model.encoder is None:
        return [], list(pairs)
    if not all(prompt for prompt, _ in pairs):
        raise InputError("a prompt is empty, and the model has an encoder that reads it", "take a task with prompts")
    start = model.encoder.start_token_id
    return [prompt for prompt, _ in pairs], [([start], answer) for _, answer in pairs]


class RoutedLayer(torch.nn.Module):
    """A routed feed-forward in place of the one of transformers, with its router. It passes indices to the experts."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.router, self.experts = own.router, SeparateExperts(own.experts)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]. Tokens over the capacity keep their expert with weight 0."""
        kept, weights, logits = self.router(hidden_states)
        weights = (weights * kept.sum(-1, keepdim=True)).flatten(0, 1)
        chosen = logits.argmax(-1, keepdim=True).flatten(0, 1)
        made: Tensor = self.experts(hidden_states.flatten(0, 1), chosen, weights)
        return made.view_as(hidden_states)


class PromptCache(EncoderDecoderCache):  # type: ignore[misc]
    """Keys and values of rows that are decoded together, and the mask of real prompt tokens, [B, S]."""

    def __init__(self, own: Cache, prompts: Cache, real: Tensor) -> None:
        super().__init__(own, prompts)
        self.real = real


@dataclass(frozen=True)
class Seq2SeqNetwork(Network):
    """A loaded encoder-decoder. `backbone` is its decoder."""

    def hidden(self, rows: Sequence[Sequence[int]], cache: Any = None, prompts: Sequence[Sequence[int]] = ()) -> Tensor:
        """See Network.hidden. Every row needs a prompt."""
        ids, real = padded(prompts)
        states = self.model.get_encoder()(input_ids=ids, attention_mask=real).last_hidden_state
        return self._states(
            cache,
            input_ids=padded(rows)[0],
            encoder_hidden_states=states,
            encoder_attention_mask=real,
            use_cache=cache is not None,
        )

    def new_cache(self) -> Any:
        """See Network.new_cache."""
        return EncoderDecoderCache(DynamicCache(), DynamicCache())

    def row_states(self, cache: Any, row: int, kept: int, prompt: int) -> tuple[RowStates, RowStates]:
        """See Network.row_states."""
        own, prompts = cache.self_attention_cache.layers, cache.cross_attention_cache.layers
        return [kept_states(at, row, kept) for at in own], [kept_states(at, row, prompt) for at in prompts]

    def decoding_cache(self, layers: list[Any], prompts: Sequence[RowStates]) -> Any:
        """See Network.decoding_cache. Prompts of unequal length are padded on the right."""
        padded_layers = list[Any]()
        for layer in zip(*prompts, strict=True):
            # [H, S, head size] -> [B, H, S, head size]
            keys, values = (
                pad_sequence([pair[part].transpose(0, 1) for pair in layer], batch_first=True).transpose(1, 2)
                for part in (0, 1)
            )
            found = DynamicLayer()  # type: ignore[no-untyped-call]
            found.update(keys, values)
            padded_layers.append(found)
        lengths = torch.tensor([row[0][0].shape[1] for row in prompts])
        real = (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).long()
        return PromptCache(Cache(layers=layers), Cache(layers=padded_layers), real)

    def keep_rows(self, cache: Any, keep: Tensor) -> None:
        """See Network.keep_rows."""
        cache.real = cache.real[keep]
        for layer in cache.cross_attention_cache.layers:
            layer.batch_select_indices(keep)

    def step(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """See Network.step. The decoder has relative biases and needs no positions."""
        states = self._states(
            cache,
            input_ids=tokens.unsqueeze(1),
            attention_mask=mask,
            encoder_hidden_states=cache.real.unsqueeze(-1).float(),  # only its shape matters; the keys are in the cache
            encoder_attention_mask=cache.real,
            use_cache=True,
        )
        return states[:, 0]


def load_seq2seq_network(lowering: Lowering) -> Network:
    """Load a model with an encoder; see load_network. Raises CheckpointError."""
    return seq2seq_network(load_model(lowering, AutoModelForSeq2SeqLM), lowering)


def seq2seq_network(model: Any, lowering: Lowering, layer: int | None = None) -> Network:
    """Return the model with `RoutedLayer` in place of the routed feed-forwards of transformers.

    layer: the model has one layer of each stack, and this layer of the checkpoint is its layer 0. None: all layers.
    Raises CheckpointError if other layers hold experts than the checkpoint's.
    """
    model.eval().requires_grad_(False)
    model.set_input_embeddings(model.get_input_embeddings())  # one embedding for encoder and decoder
    spec, experts = lowering.model, dict[int, Any]()
    for name, module in list(model.named_modules()):
        match = _ROUTED.match(name)
        if match is None or not hasattr(module, "experts"):
            continue
        is_decoder = match[1] == "decoder"
        if layer is not None and is_decoder != (layer >= spec.first_decoder_layer):
            continue
        number = int(match[2]) + (spec.first_decoder_layer if is_decoder else 0) if layer is None else 0
        routed = RoutedLayer(module)
        if not spec.layers[number if layer is None else layer].experts.router.capacity:
            routed.router.expert_capacity = _NO_CAPACITY
        model.get_submodule(name.rpartition(".")[0]).mlp = routed
        experts[number] = routed.experts
    expected = spec.expert_layers if layer is None else (0,) * bool(spec.layers[layer].experts.count)
    if tuple(sorted(experts)) != expected:
        raise CheckpointError(
            f"`{lowering.checkpoint.root}`: {len(experts)} layers of `{type(model).__name__}` hold routed experts, not "
            f"the {len(expected)} that are expected",
            "install a release of transformers that pyproject.toml allows",
        )
    parameters = {name: (lowering.loaded[name], source) for name, source in lowering.dense.items()}
    head = model.get_output_embeddings()
    return Seq2SeqNetwork(model, model.get_decoder(), head, experts, parameters, spec.vocab_size, spec.logits_scale)
