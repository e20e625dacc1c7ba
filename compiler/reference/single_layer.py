"""One layer of a checkpoint's model in torch. Its weights are set from outside, layer after layer.

Shapes: B rows of a batch, T tokens of the longest row, S tokens of the longest prompt, D hidden.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM

from ..checkpoint.stand_ins import build_model, read_config
from ..families import Lowering
from .network import Network, network_of, quiet_transformers
from .seq2seq import seq2seq_network

# Keys of transformers' configurations that decide which layers are routed, with values that make layer 0 routed.
_ROUTED = {
    "mlp_only_layers": [], "decoder_sparse_step": 1, "first_k_dense_replace": 0, "moe_layer_interval": 1,
    "moe_layer_start_index": 0, "moe_layer_end_index": 0, "encoder_sparse_step": 1,
}  # fmt: skip
_PLAIN = {
    **_ROUTED, "mlp_only_layers": [0], "first_k_dense_replace": 1, "moe_layer_start_index": 1,
    "encoder_sparse_step": 0,
}  # fmt: skip
_LAYER_NUMBER = re.compile(r"\.(layers|block)\.\d+\.")


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of a batch, while an encoder reads them or afterwards.

    real: 1 for tokens, 0 for padding, int64 [B, S].
    states: the encoder's output, [B, S, D]; None while the encoder reads.
    """

    real: Tensor
    states: Tensor | None = None


@dataclass(frozen=True)
class SingleLayer:
    """A model of one layer.

    network: the model; its only layer has the number 0.
    stack: the part of the model that runs the layer.
    """

    network: Network
    stack: Any

    def __call__(self, states: Tensor, prompts: Prompts | None = None) -> Tensor:
        """Run the layer: [B, T, D] -> [B, T, D]. A causal mask hides the padding of rows from real tokens.

        prompts: of a model with an encoder.
        """
        inputs: dict[str, Any] = {"inputs_embeds": states}
        if prompts is None:
            inputs["use_cache"] = False
        elif prompts.states is None:
            inputs["attention_mask"] = prompts.real
        else:
            read = {"encoder_hidden_states": prompts.states, "encoder_attention_mask": prompts.real}
            inputs |= {**read, "use_cache": False}
        out: Tensor = self.stack(**inputs).last_hidden_state
        return out

    def parameter_name(self, name: str) -> str:
        """Return the parameter of this model that holds a dense weight of any layer.

        name: canonical name. Raises KeyError.
        """
        return _LAYER_NUMBER.sub(r".\1.0.", self.network.parameters[name][0], count=1)


def build_single_layer(lowering: Lowering, layer: int = 0) -> SingleLayer:
    """Build a layer like this one in float32, with unset weights and a vocabulary of one token.

    The final norm and the scale of the embeddings are left out.
    Raises CheckpointError if transformers cannot build the model.
    """
    is_routed = lowering.model.layers[layer].experts.count > 0
    with quiet_transformers(lowering.checkpoint.root, "build a layer of the model"):
        config = read_config(lowering.checkpoint)
        config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 1, None
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        changes = dict(_ROUTED if is_routed else _PLAIN)
        if lowering.model.encoder is not None:
            return _build_stack_layer(lowering, layer, config, changes)
        kind = (getattr(config, "layer_types", None) or [None])[layer:][:1]
        for name, value in {**changes, "layer_types": kind, "embedding_multiplier": 1.0}.items():
            if getattr(config, name, None) is not None:
                setattr(config, name, value)
        model = build_model(config, lowering.checkpoint)
    model.get_decoder().norm = nn.Identity()
    network = network_of(model, lowering, [0] if is_routed else [])
    return SingleLayer(network, network.backbone)


def _build_stack_layer(lowering: Lowering, layer: int, config: Any, changes: dict[str, Any]) -> SingleLayer:
    """Build a layer of an encoder, or of the decoder that reads the encoder's output."""
    is_encoder = layer < lowering.model.first_decoder_layer
    config.num_layers, config.num_decoder_layers = 1, 1
    config.encoder_sparse_step = config.decoder_sparse_step = changes["encoder_sparse_step"]
    loader: Any = AutoModelForSeq2SeqLM
    model = loader.from_config(config, dtype=torch.float32)
    model.get_encoder().final_layer_norm = nn.Identity()
    model.get_decoder().final_layer_norm = nn.Identity()
    network = seq2seq_network(model, lowering, layer)
    return SingleLayer(network, model.get_encoder() if is_encoder else model.get_decoder())
