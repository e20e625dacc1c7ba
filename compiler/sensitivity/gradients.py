"""The predictions of fisher.py, one layer at a time.

Texts pass the layers once and leave the residual stream before each layer on disk. Gradients of the sketches at the
logits then go back from the last layer to the first. Of a layer, three things are kept for all texts: the inputs of its
experts, the chosen experts, and the gradient at the sum of their outputs. The gradients of every expert follow from
these, so each format is unpacked once. A killed run continues after the last complete layer.
Shapes: B rows of a batch, T tokens of the longest, D hidden, U units of a layer, S formats.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moec.manifests.model import UnitKey
from moec.manifests.progress import Progress
from moec.manifests.quant import QuantSpec

from ..quantization.unit_store import UnitStore
from ..reference.expert_module import SeparateExperts, summed_experts
from ..walker.loaded_layer import LoadedLayer
from ..walker.output_head import OutputHead
from ..walker.texts import SKETCHES, TOKENS_PER_BACKWARD, AnswerTexts, TextStates
from ..workspace.journal import Journal
from ..workspace.parallel import Workers, workers
from .fisher import sketch
from .unit_prices import HandedTexts, HandedTokens, expert_squares

TOKENS_PER_TEXT = 256
"""Maximum number of tokens of one text. Each text is one draw, and many short draws tell more than few long ones."""
_DIFFERENTIABLE = "moec_differentiable"
_ENCODED = "encoded"

PriceElsewhere = Callable[[UnitStore, int, HandedTexts, Sequence[QuantSpec]], Iterator[np.ndarray]]
"""Finds the squares [P, S] of every expert of a layer, in order, on other machines."""


@dataclass(slots=True)
class _Upstream:
    """Gradients of the sketches for one batch, before a layer.

    states: at the residual stream, [SKETCHES, B, T, D].
    encoded: at the encoder's output, [SKETCHES, B, S, D]; None without an encoder, and within it.
    """

    states: Tensor
    encoded: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        return [self.states] if self.encoded is None else [self.states, self.encoded]


class _Handed(threading.local):
    """Inputs that the pass of this thread handed to the experts, and the sum of their outputs, with its graph."""

    tokens: tuple[Tensor, Tensor, Tensor, Tensor] | None = None


class LayerGradients:
    """Predicts the KL of every unit in every format.

    store: quantized units.
    texts: texts that neither search nor certificate measures.
    specs: formats below 16 bits, and pruning.
    elsewhere: other machines that price experts, or None for the threads of this process.
    """

    def __init__(
        self,
        slot: LoadedLayer,
        store: UnitStore,
        texts: AnswerTexts,
        specs: Sequence[QuantSpec],
        journal: Journal,
        elsewhere: PriceElsewhere | None = None,
    ) -> None:
        self._slot, self._model, self._store, self._answers = slot, slot.model, store, texts
        self._specs, self._journal, self._elsewhere = list(specs), journal, elsewhere
        self._handed = _Handed()

    def run(self, seed: int, threads: int, progress: Progress) -> np.ndarray:
        """Return the predicted KL in nats per answer token, float64 [U of all layers, S]; NaN without a price.

        Units are in storage order. The result has the same bits for any number of threads.
        seed: seed of the sketches.
        progress: called with (layers done, layers in all). Each layer is passed twice.
        """
        layers = self._model.num_layers
        with workers(threads) as pool:
            layer, upstream = self._take_over()
            if upstream is None:
                self._forward(pool, lambda done: progress(done, 2 * layers))
                upstream = self._after_last_layer(pool, seed)
            for at in range(layer, -1, -1):
                upstream = self._layer(at, upstream, pool)
                progress(2 * layers - at, 2 * layers)
        squares = [self._journal.arrays(f"gradients-{at}", dict)["squares"] for at in range(layers)]
        return np.concatenate(squares) / (2 * SKETCHES * max(sum(self._answers.counts), 1))

    def _begin(self) -> TextStates:
        return TextStates.begin(self._answers.texts, self._slot.embed, TOKENS_PER_BACKWARD)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _forward(self, pool: Workers, step: Callable[[int], None]) -> None:
        """Pass all layers once, from where a killed run stopped. The residual stream before each layer goes to disk.

        The encoder's last states go to disk as well, before their norm.
        """
        layers = self._model.num_layers
        stored = next((at for at in range(layers + 1) if not self._is_stored(f"before-{at}")), layers + 1)
        if stored > layers:
            return
        start = max(stored - 1, 0)
        if stored:
            texts = self._texts_before(start)
        else:
            texts = self._begin()
            self._write("before-0", texts.states)
        for layer in range(start, layers):
            self._slot.load(layer)
            self._slot.run([texts], pool)
            if texts.is_encoding and layer + 1 == self._model.first_decoder_layer:
                self._write(_ENCODED, texts.states)
                texts.begin_decoding(self._slot.encoder_normed)
            self._write(f"before-{layer + 1}", texts.states)
            step(layer + 1)

    def _texts_before(self, layer: int) -> TextStates:
        """Return the texts before a layer, as `_forward` left them. Raises RuntimeError if they are gone."""
        texts = self._begin()
        if texts.is_encoding and layer >= self._model.first_decoder_layer:
            self._read_into(texts.states, _ENCODED)
            texts.begin_decoding(self._slot.encoder_normed)
        self._read_into(texts.states, f"before-{layer}")
        return texts

    def _is_stored(self, stage: str) -> bool:
        return self._journal.read_stream(stage) is not None

    def _write(self, stage: str, states: Iterable[Tensor]) -> None:
        with self._journal.stream(stage) as file:
            for state in states:
                file.write(memoryview(state.contiguous().numpy().tobytes()))

    def _read_into(self, states: list[Tensor], stage: str) -> None:
        """Replace tensors by those that `_write` has written, of the same shapes. Raises RuntimeError."""
        stored, start = self._journal.read_stream(stage), 0
        if stored is None:
            raise RuntimeError(f"{stage} was written and cannot be read")
        for at, state in enumerate(states):
            size = state.numel() * state.element_size()
            states[at] = torch.from_numpy(stored.read(start, size).view(np.float32).copy()).view(state.shape)
            start += size

    # -- backward -----------------------------------------------------------------------------------------------------

    def _take_over(self) -> tuple[int, list[_Upstream] | None]:
        """Return the next layer to pass, from the last on, and the gradients before the layer after it.

        These are None if no run has left them, or if a stream is missing. All layers are then passed again.
        """
        last = self._model.num_layers - 1
        layer = next((at for at in range(last, -1, -1) if self._journal.get(f"gradients-{at}") is None), -1)
        if layer == -1:
            return layer, []
        needed = [f"before-{at}" for at in range(layer + 1)]
        needed += [_ENCODED] if self._model.encoder is not None and layer >= self._model.first_decoder_layer - 1 else []
        if layer == last or not all(map(self._is_stored, [*needed, f"upstream-{layer + 1}"])):
            return last, None
        texts = self._begin()
        if texts.is_encoding and layer + 1 >= self._model.first_decoder_layer:
            texts.begin_decoding(lambda states: states)  # its shapes are needed alone
        upstream = self._zeros(texts)
        tensors = [tensor for batch in upstream for tensor in batch.tensors()]
        self._read_into(tensors, f"upstream-{layer + 1}")
        filled = iter(tensors)
        return layer, [_Upstream(*(next(filled) for _ in batch.tensors())) for batch in upstream]

    @staticmethod
    def _zeros(texts: TextStates) -> list[_Upstream]:
        """Return gradients of zero for each batch."""

        def of(state: Tensor) -> Tensor:
            return torch.zeros(SKETCHES, *state.shape)

        if not texts.encoded:
            return [_Upstream(of(state)) for state in texts.states]
        return [_Upstream(of(state), of(read)) for state, read in zip(texts.states, texts.encoded, strict=True)]

    def _after_last_layer(self, pool: Workers, seed: int) -> list[_Upstream]:
        """Return the gradients of the sketches after the last layer."""
        texts, head = self._texts_before(self._model.num_layers), self._slot.head()
        upstream = self._zeros(texts)
        batches = range(len(texts.states))
        at_logits = pool.in_order(lambda at: self._at_logits(texts, at, head, seed), batches)
        for batch, gradients in zip(upstream, at_logits, strict=True):
            batch.states = gradients
        return upstream

    def _at_logits(self, texts: TextStates, batch: int, head: OutputHead, seed: int) -> Tensor:
        hidden, indices = texts.states[batch].requires_grad_(), texts.batches[batch]
        lengths, counts = texts.lengths(batch), [self._answers.counts[at] for at in indices]
        spans = [row[length - count : length] for row, length, count in zip(hidden, lengths, counts, strict=True)]
        normed = self._slot.normed(torch.cat(spans))
        draws = [np.random.default_rng([seed, indices[0], number]) for number in range(SKETCHES)]
        at_normed = torch.empty(SKETCHES, *normed.shape)
        for tokens in head.token_slices(len(normed)):
            logits = head.logits(normed[tokens].detach())
            for number, drawn in enumerate(draws):
                at_normed[number, tokens] = head.back(sketch(logits, drawn), logits).cpu()
        gradients = [
            torch.autograd.grad(normed, hidden, one, retain_graph=number + 1 < SKETCHES)[0]
            for number, one in enumerate(at_normed)
        ]
        return torch.stack(gradients)

    def _layer(self, layer: int, upstream: list[_Upstream], pool: Workers) -> list[_Upstream]:
        """Return the gradients before a layer. The squares of its units are in the journal afterwards."""
        texts = self._texts_before(layer)
        self._slot.load(layer)
        if texts.is_encoding and layer + 1 == self._model.first_decoder_layer:
            upstream = self._before_encoder_norm(texts, upstream)
        real, text_of_token = torch.cat([texts.real(at) for at in range(len(texts.states))]), texts.text_of_token()
        with self._differentiable():
            passes = list(pool.in_order(lambda at: self._back(texts, at, upstream), range(len(texts.states))))
        before = [gradients for gradients, _ in passes]
        parts = [handed for _, handed in passes if handed is not None]
        del passes
        shape = len(self._model.units_of_layer(layer)), len(self._specs)
        squares = np.full(shape, np.nan)
        if parts:
            tokens = _joined(parts, real.to(self._slot.device))
            squares = self._priced(layer, HandedTexts(tokens, text_of_token, len(texts.texts.rows)), pool)
        self._write(f"upstream-{layer}", (tensor for batch in before for tensor in batch.tensors()))
        self._journal.arrays(f"gradients-{layer}", lambda: {"squares": squares})
        for stage in (f"before-{layer + 1}", f"upstream-{layer + 1}"):
            self._journal.forget(stage)  # the next layer needs neither
        return before

    def _before_encoder_norm(self, texts: TextStates, upstream: list[_Upstream]) -> list[_Upstream]:
        """Return the gradients after the encoder's last layer, from those at its normed output."""
        raw = list(texts.states)
        self._read_into(raw, _ENCODED)
        before = []
        for batch, state in zip(upstream, raw, strict=True):
            if batch.encoded is None:
                raise RuntimeError("a decoder's gradients reach the encoder's output")
            normed = self._slot.encoder_normed(state.requires_grad_())
            gradients = [torch.autograd.grad(normed, state, one, retain_graph=True)[0] for one in batch.encoded]
            before.append(_Upstream(torch.stack(gradients)))
        return before

    def _back(self, texts: TextStates, batch: int, every: list[_Upstream]) -> tuple[_Upstream, HandedTokens | None]:
        """Return the gradients of one batch before the layer, and what its tokens handed to the experts."""
        upstream, device, given = every[batch], self._slot.device, texts.prompts(batch)
        entering = texts.states[batch].to(device).requires_grad_()
        prompts = None if given is None else given.to(device)
        self._handed.tokens = None
        leaves = [entering]
        if prompts is not None and prompts.states is not None:
            leaves.append(prompts.states.requires_grad_())
        out = self._slot.single(entering, prompts)
        handed, self._handed.tokens = self._handed.tokens, None
        wanted = leaves if handed is None else [*leaves, handed[3]]
        by_sketch = [
            torch.autograd.grad(out, wanted, gradient, retain_graph=number + 1 < SKETCHES)
            for number, gradient in enumerate(upstream.states.to(device))
        ]
        before = _Upstream(torch.stack([leaf_gradients[0] for leaf_gradients in by_sketch]).cpu())
        # The results are as large as the inputs, which are not needed any more.
        texts.states[batch], upstream.states = torch.empty(0), torch.empty(0)
        if upstream.encoded is not None:
            before.encoded = upstream.encoded + torch.stack([leaf_gradients[1] for leaf_gradients in by_sketch]).cpu()
        if handed is None:
            return before, None
        inputs, chosen, weights, _ = handed
        return before, HandedTokens(
            inputs.detach(), chosen, weights.detach(), [leaf_gradients[-1] for leaf_gradients in by_sketch]
        )

    @contextmanager
    def _differentiable(self) -> Iterator[None]:
        """Let the experts of the loaded layer compute with gradients, and record what they are handed."""
        module, model = self._slot.experts, self._slot.single.model
        if module is None:
            yield
            return

        def keep(module: Any, arguments: tuple[Tensor, ...], total: Tensor) -> None:
            inputs, chosen, weights = arguments[:3]
            self._handed.tokens = inputs, chosen, weights, total

        handle, before = module.register_forward_hook(keep), None
        if not isinstance(module, SeparateExperts):
            from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

            before = model.get_experts_implementation()
            ALL_EXPERTS_FUNCTIONS.register(_DIFFERENTIABLE, summed_experts)
            model.set_experts_implementation(_DIFFERENTIABLE)
        try:
            yield
        finally:
            handle.remove()
            if before is not None:
                model.set_experts_implementation(before)

    def _priced(self, layer: int, handed: HandedTexts, pool: Workers) -> np.ndarray:
        """Return the squares of all units of a layer, [U, S], experts in parallel."""

        def restored(unit: UnitKey, spec: QuantSpec) -> torch.Tensor | None:
            return self._store.weight(unit, spec) if self._store.holds(unit, spec) else None

        def one(expert: int) -> np.ndarray:
            unit_of = partial(UnitKey, layer, expert)
            return expert_squares(self._slot.experts, unit_of, handed, self._specs, restored)

        if self._elsewhere is None:
            return np.concatenate(list(pool.in_order(one, range(self._model.layers[layer].experts.count))))
        return np.concatenate(list(self._elsewhere(self._store, layer, handed, self._specs)))


def _joined(parts: list[HandedTokens], real: Tensor) -> HandedTokens:
    """Return the real tokens of all batches. `parts` are emptied, so that memory holds one copy.

    real: bool, for each position of all batches.
    """
    inputs = torch.cat([batch.inputs for batch in parts])[real]
    gradients = [torch.cat([batch.gradients.pop(0) for batch in parts])[real] for _ in range(SKETCHES)]
    chosen, weights = (torch.cat([getattr(batch, name) for batch in parts])[real] for name in ("chosen", "weights"))
    parts.clear()
    return HandedTokens(inputs, chosen, weights, gradients)
