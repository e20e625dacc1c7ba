"""LoadedLayer: one layer of the reference model, whose weights are replaced by those of any other layer.

Shapes: B rows of a batch, T tokens of the longest row, D hidden, V vocabulary, A tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moec.manifests.model import UnitKey
from moec.profiles.freed_memory import give_back_freed_memory

from ..families import Lowering
from ..reference.expert_module import projection_of
from ..reference.routers import RouterMasks
from ..reference.single_layer import SingleLayer, build_single_layer
from ..workspace.parallel import Workers
from .memory import LayerKind, layer_kind
from .output_head import OutputHead, output_head
from .texts import TextStates
from .torch_device import CPU

WeightName = UnitKey | str
"""One projection of one expert, or the canonical name of a dense weight (manifests.model, dense_shapes)."""
Replaced = Callable[[WeightName], Tensor | None]
"""The weight that takes the place of the checkpoint's own; None for its own."""
_CORRECTIONS = ("e_score_correction_bias", "expert_bias")
_LOG_RATES, _STEP_BIASES = "A_log", "dt_bias"
"""Names in transformers' models of numbers that stand in the ModelSpec."""
_LAYER_NUMBER = re.compile(r"\.(layers|block)\.\d+\.")


class LoadedLayer:
    """One layer in float32, with the embedding, the norms and the head of the model.

    resident_layers: number of layers, from the first, whose 16-bit weights stay in memory after their first use. The
        embedding and the norms outside the layers stay with the first.
    device: where the layer computes. Texts, and weights that stay, are in host memory.
    Raises CheckpointError if transformers cannot build the first layer.
    """

    def __init__(self, lowering: Lowering, resident_layers: int = 0, device: torch.device = CPU) -> None:
        self._lowering, self._resident_layers, self.device = lowering, resident_layers, device
        self.model = lowering.model
        self.layer = -1
        self._kinds: dict[LayerKind, SingleLayer] = {}
        self._resident: dict[WeightName, Tensor] = {}
        self._mask: tuple[RouterMasks, str] | None = None
        self._choose_module(0)

    def _choose_module(self, layer: int) -> None:
        """Load into the module of this layer's kind from now on. Raises CheckpointError if it cannot be built."""
        spec = self.model.layers[layer]
        kind = layer_kind(self.model, layer)
        if kind not in self._kinds:
            self._kinds[kind] = build_single_layer(self._lowering, layer)
            self._kinds[kind].model.to(self.device)
        self.single = self._kinds[kind]
        stated = dict.fromkeys(_CORRECTIONS, spec.experts.router.correction)
        if spec.delta is not None:
            stated |= {_LOG_RATES: spec.delta.log_rates, _STEP_BIASES: spec.delta.step_biases}
        stated |= {"per_expert_scale": spec.experts.router.expert_scales, "layer_scalar": (spec.scale,)}
        for name, values in (*self.single.model.named_buffers(), *self.single.model.named_parameters()):
            if numbers := stated.get(name.rpartition(".")[2]):
                values.data.copy_(torch.tensor(numbers).view(values.shape))

    @property
    def experts(self) -> Any:
        """The module of the routed experts of the loaded layer, None if it has none."""
        return self.single.experts

    def load(self, layer: int, replaced: Replaced = lambda name: None) -> None:
        """Copy the weights of a layer over those of the previous one. They come from disk, or from memory if they stay.

        replaced: weights in place of the checkpoint's own. A unit without columns stands for a pruned expert: the
            router chooses among the others.
        """
        self.give_back_memory()  # what the passes of another layer have left
        self._end_pruning()
        self._choose_module(layer)
        self.layer = layer
        for name in self.dense_names(layer):
            self._set_or_restore(name, replaced(name))
        left_out = set[int]()
        for unit in self.model.units_of_layer(layer):
            weight = replaced(unit)
            if weight is not None and not weight.shape[1]:
                left_out.add(unit.expert)
            else:
                self._set_or_restore(unit, weight)
        if left_out:
            router = self._parameter_name(f"layers.{layer}.router")
            self._mask = RouterMasks(self.single.model), router
            self._mask[0].leave_out(router, left_out)

    def give_back_memory(self) -> None:
        """Return freed memory to the system, unless all layers stay: then there is enough, and passes need it again."""
        if self._resident_layers < self.model.num_layers:
            give_back_freed_memory()

    def _set_or_restore(self, name: WeightName, weight: Tensor | None) -> None:
        self.set(name, self.own(name) if weight is None else weight)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the 16-bit weights that stay in memory."""
        return sum(weight.numel() * weight.element_size() for weight in self._resident.values())

    def own(self, name: WeightName) -> Tensor:
        """Return a weight of the checkpoint in its 16-bit type. Keep it if its layer stays in memory."""
        if name in self._resident:
            return self._resident[name]
        if isinstance(name, UnitKey):
            layer, weight = name.layer, self._lowering.unit(name)
        else:
            layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
            weight = self._lowering.dense_weight(name)
        if layer < self._resident_layers:
            self._resident[name] = weight
        return weight

    def _end_pruning(self) -> None:
        """Let the router choose among all experts again, after a layer with pruned ones."""
        if self._mask is not None:
            masks, router = self._mask
            masks.leave_out(router, ())
            self._mask = None

    def set(self, name: WeightName, weight: Tensor) -> None:
        """Compute with this weight of the loaded layer."""
        view = self.view(name)
        view.copy_(weight.reshape(view.shape))

    def view(self, name: WeightName) -> Tensor:
        """Return the memory of one weight of the loaded layer on its device, float32, shaped like TensorSource.view."""
        if isinstance(name, UnitKey):
            return projection_of(self.experts, name.expert, name.projection)
        source, loaded = self._lowering.dense[name], self.single.model.get_parameter(self._parameter_name(name)).data
        if source.rows is not None and loaded.shape[0] == source.shape[0]:  # here too several weights share a matrix
            loaded = loaded[slice(*source.rows)]
        return source.view(loaded)

    def _parameter_name(self, name: str) -> str:
        """Return the parameter of the loaded layer that holds a dense weight."""
        return _LAYER_NUMBER.sub(r".\1.0.", self._lowering.loaded[name], count=1)

    def dense_names(self, layer: int) -> list[str]:
        """Return the canonical names of the layer's weights outside the experts.

        The layers of a stack share its relative bias, which is listed for each of them.
        """
        names = [name for name in self.model.dense_shapes() if name.startswith(f"layers.{layer}.")]
        first = self.model.first_decoder_layer if layer >= self.model.first_decoder_layer else 0
        shared = f"layers.{first}.relative_bias"
        return [*names, shared] if first != layer and shared in self.model.dense_shapes() else names

    def forward(self, texts: TextStates, batch: int) -> Tensor:
        """Return the states of a batch after the layer, [B, T, D], in host memory."""
        prompts = texts.prompts(batch)
        with torch.inference_mode():
            states = texts.states[batch].to(self.device)
            return self.single(states, None if prompts is None else prompts.to(self.device)).to(CPU, copy=True)

    def run(self, texts: Iterable[TextStates], pool: Workers) -> None:
        """Move texts through the loaded layer, batches in parallel."""
        moving = list(texts)
        for text in moving:
            self.begin_stack(text)
        jobs = [(text, at) for text in moving for at in range(len(text.states))]
        for (text, at), state in zip(jobs, pool.in_order(lambda job: self.forward(*job), jobs), strict=True):
            text.states[at] = state

    def begin_stack(self, text: TextStates) -> None:
        """If the loaded layer is the decoder's first and the encoder has read a text, begin the text's decoding."""
        if text.is_encoding and self.layer == self.model.first_decoder_layer:
            text.begin_decoding(self.encoder_normed)

    # -- before and after the layers ---------------------------------------------------------------------------------

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] -> [..., D], with the checkpoint's own embedding."""
        return embedded(ids, self.own("embedding"), self.model.embedding_scale)

    def encoder_normed(self, states: Tensor) -> Tensor:
        """Apply the norm after the encoder's last layer, [..., D]."""
        return functional.rms_norm(states, states.shape[-1:], self.own("encoder_norm").float(), self.model.norm_eps)

    def normed(self, states: Tensor) -> Tensor:
        """Apply the norm after the last layer, times the scale of the logits. [A, D] -> [A, D]."""
        shape, eps, scale = (states.shape[-1],), self.model.norm_eps, self.model.logits_scale
        weight = (self.own("final_norm").float() + self.model.norm_offset) * scale
        if self.model.norm == "rms":
            return functional.rms_norm(states, shape, weight, eps)
        bias = self.own("final_norm_bias").float() * scale
        return functional.layer_norm(states, shape, weight, bias, eps)

    def head(self) -> OutputHead:
        """Return the checkpoint's own head, on the device."""
        return output_head(self._lowering, self.device)


def embedded(ids: Tensor, table: Tensor, scale: float) -> Tensor:
    """Token ids [...] -> [..., D] float32.

    table: [V, D].
    scale: factor of every embedding.
    """
    states = table[ids].float()
    return states if scale == 1.0 else states * scale
