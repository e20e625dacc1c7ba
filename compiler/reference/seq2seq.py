"""The reference model with an encoder: prompts go through it once, rows are what the decoder's text consists of.

Capacity is counted in the encoder alone, as while generating: a decoder that is called with whole answers must route
each token as if it came alone.
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

from moec.manifests.errors import CheckpointError

from ..families import Lowering
from .expert_module import SeparateExperts
from .network import Network, RowStates, kept_states, load_model, padded

_ROUTED = re.compile(r"^(encoder|decoder)\.block\.(\d+)\.layer\.\d+\.mlp$")
_NO_CAPACITY = 1 << 62


class RoutedLayer(torch.nn.Module):
    """A routed feed-forward in the place of transformers' own, around its router: experts are called with indices."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.router, self.experts = own.router, SeparateExperts(own.experts)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]. Tokens over the capacity keep their expert and have the weight 0."""
        kept, weights, logits = self.router(hidden_states)
        weights = (weights * kept.sum(-1, keepdim=True)).flatten(0, 1)
        chosen = logits.argmax(-1, keepdim=True).flatten(0, 1)
        made: Tensor = self.experts(hidden_states.flatten(0, 1), chosen, weights)
        return made.view_as(hidden_states)


class PromptCache(EncoderDecoderCache):  # type: ignore[misc]
    """Keys and values of rows that are decoded together, and which places of their prompts are real, [B, S]."""

    def __init__(self, own: Cache, prompts: Cache, real: Tensor) -> None:
        super().__init__(own, prompts)
        self.real = real


@dataclass(frozen=True)
class Seq2SeqNetwork(Network):
    """A loaded encoder-decoder; `backbone` is its decoder."""

    def hidden(self, rows: Sequence[Sequence[int]], cache: Any = None, prompts: Sequence[Sequence[int]] = ()) -> Tensor:
        """As Network.hidden; every row has a prompt."""
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
        """As Network.new_cache."""
        return EncoderDecoderCache(DynamicCache(), DynamicCache())

    def row_states(self, cache: Any, row: int, kept: int, prompt: int) -> tuple[RowStates, RowStates]:
        """As Network.row_states."""
        own, prompts = cache.self_attention_cache.layers, cache.cross_attention_cache.layers
        return [kept_states(at, row, kept) for at in own], [kept_states(at, row, prompt) for at in prompts]

    def decoding_cache(self, layers: list[Any], prompts: Sequence[RowStates]) -> Any:
        """As Network.decoding_cache; prompts of unequal length are padded on the right."""
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
        """As Network.keep_rows."""
        cache.real = cache.real[keep]
        for layer in cache.cross_attention_cache.layers:
            layer.batch_select_indices(keep)

    def step(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """As Network.step; a decoder with biases by distance needs no positions."""
        states = self._states(
            cache,
            input_ids=tokens.unsqueeze(1),
            attention_mask=mask,
            encoder_hidden_states=cache.real.unsqueeze(-1).float(),  # its shape alone matters: keys are in the cache
            encoder_attention_mask=cache.real,
            use_cache=True,
        )
        return states[:, 0]


def load_seq2seq_network(lowering: Lowering) -> Network:
    """As load_network, of a model with an encoder. Raises CheckpointError."""
    model = load_model(lowering, AutoModelForSeq2SeqLM)
    model.eval().requires_grad_(False)
    model.set_input_embeddings(model.get_input_embeddings())  # one for both stacks, also where they were kept apart
    spec, experts = lowering.model, dict[int, Any]()
    for name, module in list(model.named_modules()):
        match = _ROUTED.match(name)
        if match is None or not hasattr(module, "experts"):
            continue
        layer = int(match[2]) + (spec.first_decoder_layer if match[1] == "decoder" else 0)
        routed = RoutedLayer(module)
        if not spec.layers[layer].experts.router.capacity:
            routed.router.expert_capacity = _NO_CAPACITY
        model.get_submodule(name.rpartition(".")[0]).mlp = routed
        experts[layer] = routed.experts
    if tuple(sorted(experts)) != spec.expert_layers:
        raise CheckpointError(
            f"`{lowering.checkpoint.root}`: {len(experts)} layers of `{type(model).__name__}` hold routed experts, not "
            f"the {len(spec.expert_layers)} that are expected",
            "install a release of transformers that pyproject.toml allows",
        )
    parameters = {name: (lowering.loaded[name], source) for name, source in lowering.dense.items()}
    head = model.get_output_embeddings()
    return Seq2SeqNetwork(model, model.get_decoder(), head, experts, parameters, spec.vocab_size, spec.logits_scale)
