"""The reference model one layer at a time: a slot that takes the weights of any layer, and texts that pass through it.

Shapes: B rows of a batch, T tokens of the longest, D hidden, V vocabulary, A tokens asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moec.manifests.model import PROJECTIONS, UnitKey
from moec.profiles.freed_memory import give_back_freed_memory

from ..families import Lowering
from ..reference.network import (
    LOGITS_PER_CHUNK,
    TOKENS_PER_FORWARD,
    Network,
    build_single_layer,
    length_batches,
    padded,
)
from ..reference.routers import RouterMasks
from ..reference.weights import WeightName, weight_view
from ..workspace.parallel import Workers

LayerKind = tuple[bool, int]
"""Whether a layer routes, and its sliding window: layers of a kind differ in their weights alone."""
_ROWS_PER_CHUNK = 4096  # of the vocabulary matrices, brought to float32 at a time


@dataclass(slots=True)
class TextStates:
    """Texts on their way through the model: token ids by batch, and the residual stream of each batch, [B, T, D].

    Rows of a batch are padded on the right, where the causal mask hides them from real tokens.
    """

    rows: list[list[int]]
    batches: list[list[int]]
    states: list[Tensor]

    @classmethod
    def begin(cls, rows: Sequence[Sequence[int]], embed: Callable[[Tensor], Tensor]) -> TextStates:
        """Texts in front of the first layer."""
        texts = [list(row) for row in rows]
        batches = length_batches([len(row) for row in texts], TOKENS_PER_FORWARD)
        return cls(texts, batches, [embed(padded([texts[index] for index in batch])[0]) for batch in batches])

    def copy(self) -> TextStates:
        """The same texts at the same place, apart."""
        return TextStates(self.rows, self.batches, [state.clone() for state in self.states])

    def real(self, batch: int) -> Tensor:
        """Which places of a batch hold tokens, [B * T] bool."""
        lengths = torch.tensor([len(self.rows[index]) for index in self.batches[batch]])
        return (torch.arange(self.states[batch].shape[1]) < lengths.unsqueeze(1)).reshape(-1)

    def tokens(self) -> Tensor:
        """The residual stream of all real tokens, in the order of the batches, [A, D]."""
        width = self.states[0].shape[-1]
        return torch.cat([state.reshape(-1, width)[self.real(at)] for at, state in enumerate(self.states)])

    def answers(self, counts: Sequence[int]) -> Tensor:
        """The residual stream of the last counts[i] tokens of each text i, texts in order, [A, D]."""
        found: list[Tensor] = [torch.empty(0)] * len(self.rows)
        for batch, state in zip(self.batches, self.states, strict=True):
            for at, index in enumerate(batch):
                length = len(self.rows[index])
                found[index] = state[at, length - counts[index] : length]
        return torch.cat(found)


class LayerSlot:
    """One decoder layer in float32 whose weights are exchanged, with what stands in front of and behind the layers."""

    def __init__(self, lowering: Lowering) -> None:
        """Raises CheckpointError if transformers cannot build the first layer."""
        self._lowering = lowering
        self.model = lowering.model
        self._networks: dict[LayerKind, Network] = {}
        self._mask: tuple[RouterMasks, str] | None = None
        self._take(0)

    def _take(self, layer: int) -> None:
        """Continue with a network of this layer's kind. Raises CheckpointError if transformers cannot build it."""
        spec = self.model.layers[layer]
        kind = bool(spec.experts.count), spec.attention.sliding_window
        if kind not in self._networks:
            self._networks[kind] = build_single_layer(self._lowering, layer)
        self.network = self._networks[kind]
        if spec.experts.router.correction:
            for name, values in (*self.network.model.named_buffers(), *self.network.model.named_parameters()):
                if name.endswith("e_score_correction_bias"):
                    values.data.copy_(torch.tensor(spec.experts.router.correction).view(values.shape))

    @property
    def experts(self) -> Any:
        """The module of the routed experts of the layer that is loaded, None where it has none."""
        return next(iter(self.network.experts.values()), None)

    def load(self, layer: int, replaced: Mapping[WeightName, Tensor] | None = None) -> None:
        """Take the weights of a layer; `replaced` come in the place of the checkpoint's own.

        A unit without columns stands for an expert that is left out: the router chooses among the others.
        """
        others = {} if replaced is None else replaced
        give_back_freed_memory()  # what the passes of another layer have left
        self._choose_among_all()
        self._take(layer)
        for name in self.dense_names(layer):
            self.set(layer, name, others[name] if name in others else self._lowering.dense_weight(name))
        left_out = set[int]()
        for unit in self.units(layer):
            weight = others[unit] if unit in others else self._lowering.unit(unit)
            if weight.shape[1]:
                self.set(layer, unit, weight)
            else:
                left_out.add(unit.expert)
        if left_out:
            self._mask = RouterMasks(self.network), self._own_name(layer, f"layers.{layer}.router")
            self._mask[0].leave_out(self._mask[1], left_out)

    def _choose_among_all(self) -> None:
        """Whatever the layer before left out."""
        if self._mask is not None:
            masks, router = self._mask
            masks.leave_out(router, ())
            self._mask = None

    def _own_name(self, layer: int, name: str) -> str:
        """What a dense weight of the layer that is loaded is called in the network, which has one layer."""
        return self.network.parameters[name][0].replace(f".layers.{layer}.", ".layers.0.", 1)

    def set(self, layer: int, name: WeightName, weight: Tensor) -> None:
        """Compute with this weight of the layer."""
        view = self.view(layer, name)
        view.copy_(weight.reshape(view.shape))

    def view(self, layer: int, name: WeightName) -> Tensor:
        """The memory of one weight of the layer that is loaded, float32, as TensorSource.view has it."""
        if isinstance(name, UnitKey):
            return weight_view(self.network, UnitKey(0, name.expert, name.projection))
        source = self.network.parameters[name][1]
        return source.view(self.network.model.get_parameter(self._own_name(layer, name)).data)

    def dense_names(self, layer: int) -> list[str]:
        """Canonical names of the layer's weights outside the experts."""
        return [name for name in self.model.dense_shapes() if name.startswith(f"layers.{layer}.")]

    def units(self, layer: int) -> list[UnitKey]:
        """All projections of the layer's experts."""
        count = self.model.layers[layer].experts.count
        return [UnitKey(layer, expert, projection) for expert in range(count) for projection in PROJECTIONS]

    def forward(self, states: Tensor) -> Tensor:
        """[B, T, D] through the layer."""
        with torch.inference_mode():
            out: Tensor = self.network.backbone(inputs_embeds=states, use_cache=False).last_hidden_state
        return out.clone()

    def run(self, texts: Iterable[TextStates], pool: Workers, step: Callable[[], None]) -> None:
        """Move texts through the loaded layer, batches side by side; step: called after each."""
        jobs = [(text, at) for text in texts for at in range(len(text.states))]
        results = pool.in_order(lambda job: self.forward(job[0].states[job[1]]), jobs)
        for (text, at), state in zip(jobs, results, strict=True):
            text.states[at] = state
            step()

    # -- in front of and behind the layers ---------------------------------------------------------------------------

    def embed(self, ids: Tensor, weight: Tensor | None = None) -> Tensor:
        """Token ids [...] to [..., D]. weight: another embedding than the checkpoint's."""
        table = self.embedding() if weight is None else weight
        states = table[ids].float()
        return states if self.model.embedding_scale == 1.0 else states * self.model.embedding_scale

    def embedding(self) -> Tensor:
        """The checkpoint's own, read anew."""
        return self._lowering.dense_weight("embedding")

    def normed(self, states: Tensor) -> Tensor:
        """The norm behind the last layer, times the scale of the logits. [A, D] -> [A, D]."""
        shape, eps, scale = (states.shape[-1],), self.model.norm_eps, self.model.logits_scale
        weight = self._lowering.dense_weight("final_norm").float() * scale
        if self.model.norm == "rms":
            return torch.nn.functional.rms_norm(states, shape, weight, eps)
        bias = self._lowering.dense_weight("final_norm_bias").float() * scale
        return torch.nn.functional.layer_norm(states, shape, weight, bias, eps)

    def head(self) -> OutputHead:
        """The checkpoint's own."""
        return output_head(self._lowering)


@dataclass(frozen=True, slots=True)
class OutputHead:
    """What turns normed residual streams into logits. matrix: [V, D], may have 16 bits; bias: float32 [V]."""

    matrix: Tensor
    bias: Tensor | None = None

    def __len__(self) -> int:
        return len(self.matrix)

    def logits(self, states: Tensor) -> Tensor:
        """[A, D] -> [A, V] float32."""
        out = torch.empty(len(states), len(self))
        for start in range(0, len(self), _ROWS_PER_CHUNK):
            piece = self.matrix[start : start + _ROWS_PER_CHUNK]
            out[:, start : start + len(piece)] = states @ piece.float().T
        return out if self.bias is None else out.add_(self.bias)

    def back(self, gradients: Tensor) -> Tensor:
        """Gradients at logits [A, V] -> at normed residual streams [A, D]."""
        out = torch.zeros(len(gradients), self.matrix.shape[1])
        for start in range(0, len(self), _ROWS_PER_CHUNK):
            out += gradients[:, start : start + _ROWS_PER_CHUNK] @ self.matrix[start : start + _ROWS_PER_CHUNK].float()
        return out


def output_head(lowering: Lowering) -> OutputHead:
    """The checkpoint's own, its matrix in 16 bits, its bias with the scale that `LayerSlot.normed` gives the states."""
    model = lowering.model
    matrix = lowering.dense_weight("embedding" if model.tie_embeddings else "lm_head")
    bias = lowering.dense_weight("lm_head_bias").float() * model.logits_scale if model.has_head_bias else None
    return OutputHead(matrix, bias)


def divergences(
    states: Tensor, reference: Tensor, head: OutputHead, reference_head: OutputHead
) -> Iterator[tuple[Tensor, Tensor]]:
    """KL(reference || other) in nats and top-1 agreement of tokens [A, D], normed, a bounded number at a time."""
    for tokens, log_p in log_probs(reference, reference_head):
        yield divergence(log_p, states[tokens], head)


def log_probs(states: Tensor, head: OutputHead) -> Iterator[tuple[slice, Tensor]]:
    """Log-probabilities of tokens [A, D], normed, a bounded number at a time: which tokens, and [a, V] of them."""
    chunk = max(1, LOGITS_PER_CHUNK // len(head))
    for start in range(0, len(states), chunk):
        tokens = slice(start, start + chunk)
        yield tokens, head.logits(states[tokens]).log_softmax(-1)


def divergence(log_p: Tensor, states: Tensor, head: OutputHead) -> tuple[Tensor, Tensor]:
    """KL in nats [a] and top-1 agreement [a] of tokens [a, D], normed, to log-probabilities [a, V]."""
    log_q = head.logits(states).log_softmax(-1)
    kl = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).clamp_min_(0)
    return kl, log_p.argmax(-1) == log_q.argmax(-1)
