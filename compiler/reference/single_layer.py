"""One layer of a checkpoint's model in torch. Its weights are set from outside, layer after layer.

Shapes: B rows of a batch, T tokens of the longest row, S tokens of the longest prompt, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM
from transformers.utils import logging as transformers_logging

from moec.manifests.errors import CheckpointError

from ..checkpoint.stand_ins import read_config
from ..families import Lowering
from .build_model import build_model
from .routed_layers import replace_routed_layer, take_sorted_experts
from .routers import FirstOfEqual

# Keys of transformers' configurations that decide which layers are routed, with values that make layer 0 routed.
_ROUTED = {
    "mlp_only_layers": [], "decoder_sparse_step": 1, "first_k_dense_replace": 0, "moe_layer_interval": 1,
    "moe_layer_start_index": 0, "moe_layer_end_index": 0, "encoder_sparse_step": 1, "mlp_layer_types": ["sparse"],
    "num_dense_layers": 0,
}  # fmt: skip
_PLAIN = {
    **_ROUTED,
    "mlp_only_layers": [0],
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "encoder_sparse_step": 0,
    "mlp_layer_types": ["dense"],
    "num_dense_layers": 1,
}
_OF_EACH_LAYER = ("layer_types", "layer_rope_theta", "num_attention_heads_per_layer")
"""Keys whose values are lists with an entry for each layer."""  # fmt: skip
_FOREIGN_ERRORS = (
    OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError, SafetensorError,
    StrictDataclassError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of a batch, while an encoder reads them or afterwards.

    real: 1 for tokens, 0 for padding, int64 [B, S].
    states: the encoder's output, [B, S, D]; None while the encoder reads.
    """

    real: Tensor
    states: Tensor | None = None

    def to(self, device: torch.device) -> Prompts:
        """Return them on a device."""
        return Prompts(self.real.to(device), None if self.states is None else self.states.to(device))


@dataclass(frozen=True)
class SingleLayer:
    """A model of one layer.

    model: the transformers model; its only layer has the number 0.
    stack: the part of the model that runs the layer.
    experts: the module of the routed experts, None if the layer has none.
    """

    model: Any
    stack: Any
    experts: Any

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
        with FirstOfEqual():
            out: Tensor = self.stack(**inputs).last_hidden_state
        return out


def build_single_layer(lowering: Lowering, layer: int = 0) -> SingleLayer:
    """Build a layer like this one in float32, with unset weights and a vocabulary of one token.

    The final norm and the scale of the embeddings are left out.
    Raises CheckpointError if transformers cannot build the model.
    """
    is_routed = lowering.model.layers[layer].experts.count > 0
    with _quiet_transformers(lowering.checkpoint.root):
        config = read_config(lowering.checkpoint)
        per_layer = _own_of_layer(config, layer)
        config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 1, None
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        changes = dict(_ROUTED if is_routed else _PLAIN)
        if lowering.model.encoder is not None:
            single = _build_stack_layer(lowering, layer, config, changes)
        else:
            own = {name: (getattr(config, name, None) or [None])[layer:][:1] for name in _OF_EACH_LAYER}
            own |= {**per_layer, "embedding_multiplier": 1.0, "mup_enabled": False}
            for name, value in {**changes, **own}.items():
                if getattr(config, name, None) is not None:
                    setattr(config, name, value)
            model = build_model(config, lowering.checkpoint)
            setattr(model.get_decoder(), lowering.loaded["final_norm"].split(".")[-2], nn.Identity())
            single = SingleLayer(model, model.get_decoder(), take_sorted_experts(model))
    single.model.eval().requires_grad_(False)
    if (single.experts is not None) != is_routed:
        raise CheckpointError(
            f"`{lowering.checkpoint.place}`: layer {layer} of `{type(single.model).__name__}` "
            f"{'lacks' if is_routed else 'has'} routed experts, expected as in `config.json`",
            "install a release of transformers that pyproject.toml allows",
        )
    return single


def _own_of_layer(config: Any, layer: int) -> dict[str, Any]:
    """Return the settings of a configuration that has others for each layer, as those of layer 0."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    of_layer = config.per_layer_config[layer]
    return {"per_layer_config": {0: {name: getattr(of_layer, name) for name in config.per_layer_attributes}}}


def _build_stack_layer(lowering: Lowering, layer: int, config: Any, changes: dict[str, Any]) -> SingleLayer:
    """Build a layer of an encoder, or of the decoder that reads the encoder's output."""
    config.num_layers, config.num_decoder_layers = 1, 1
    config.encoder_sparse_step = config.decoder_sparse_step = changes["encoder_sparse_step"]
    loader: Any = AutoModelForSeq2SeqLM
    model = loader.from_config(config, dtype=torch.float32)
    model.get_encoder().final_layer_norm = nn.Identity()
    model.get_decoder().final_layer_norm = nn.Identity()
    stack = model.get_encoder() if layer < lowering.model.first_decoder_layer else model.get_decoder()
    has_capacity = lowering.model.layers[layer].experts.router.capacity > 0
    return SingleLayer(model, stack, replace_routed_layer(stack, has_capacity))


@contextmanager
def _quiet_transformers(root: Path) -> Iterator[None]:
    """Silence progress bars and warnings of transformers, and turn its errors into CheckpointError."""
    settings: Any = transformers_logging
    bars, level = settings.is_progress_bar_enabled(), settings.get_verbosity()
    settings.disable_progress_bar()
    settings.set_verbosity_error()
    try:
        yield
    except _FOREIGN_ERRORS as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"`{root}`: transformers cannot build a layer of the model: {reason}", "check that the folder is complete"
        ) from error
    finally:
        settings.set_verbosity(level)
        if bars:
            settings.enable_progress_bar()
