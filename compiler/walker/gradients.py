"""What rounding a unit costs where the model does not fit in memory: the prediction of fisher.py, layer by layer.

Texts pass the layers once and leave the residual stream in front of each layer on disk. Gradients of the sketches at
the logits then go back from the last layer to the first. Of a layer only what its experts read, whom the router chose
and the gradient at their sum are kept, for all texts together: every expert's own gradients follow from these, so each
of its formats is unpacked once. After every layer a killed run can go on.
Shapes: B rows of a batch, T tokens of the longest, D hidden, U units of a layer, S formats.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moec.evaluation.text_pairs import TokenPair, forced_rows
from moec.manifests.model import PROJECTIONS, UnitKey
from moec.manifests.progress import Progress
from moec.manifests.quant import QuantSpec

from ..families import Lowering
from ..reference.network import length_batches, padded
from ..sensitivity.fisher import SKETCHES, TOKENS_PER_BACKWARD, recorded_experts, shortened, sketch
from ..sensitivity.sensitivity import SensitivityTable, plain_plan, probed
from ..workspace.journal import Journal
from ..workspace.parallel import Workers, workers
from .slot import LayerSlot, OutputHead, TextStates
from .store import StreamedStore, layer_units
from .unit_prices import HandedTexts, HandedTokens, expert_squares

GRADIENT_TOKENS = 16_384
"""Tokens of all texts: what is held of them is as large as seven residual streams."""
TOKENS_PER_TEXT = 256
"""Of one text: every text is one draw, and many short ones say more than few long ones."""
_TRACED = "moec_traced"


PriceElsewhere = Callable[[StreamedStore, int, HandedTexts, Sequence[QuantSpec]], Iterator[np.ndarray]]
"""Squares [3, S] of every expert of a layer, in order, found by other machines."""


class _Trace(threading.local):
    """What the experts of the pass that this thread is in were handed, and their sum, with its graph."""

    handed: tuple[Tensor, Tensor, Tensor, Tensor] | None = None


def with_gradients(
    table: SensitivityTable, store: StreamedStore, predicted: Mapping[tuple[UnitKey, QuantSpec], float]
) -> SensitivityTable:
    """A sweep's table with units priced by gradients, on the scale of its dense weights.

    Those were measured as the KL on all tokens of the probe texts, gradients speak of answers. So predictions are
    multiplied by what the experts of all layers were measured to cost in the probe format, over what is predicted.
    Units of experts that no token asked for keep the price of their errors, and such experts stay.
    """
    measured = foreseen = 0.0
    plain = plain_plan(store.model, store.lowering.spec_16bit, store.quantizer)
    for layer in store.model.expert_layers:
        for name in PROJECTIONS:
            own, probe = probed(plain, layer, name, store.specs)
            known = [unit for unit in own if (unit, probe) in predicted]
            if probe is not None:
                measured += sum(table.unit_loss(store, unit, probe) for unit in known)
                foreseen += sum(predicted[(unit, probe)] for unit in known)
    factor = measured / foreseen if measured > 0 and foreseen > 0 else 1.0
    priced = {key: factor * kl for key, kl in predicted.items()}
    for unit in plain.units:
        for spec in store.specs:
            if (unit, spec) not in priced and spec.fits(store.model.unit_shape(unit.layer, unit.projection)[1]):
                priced[(unit, spec)] = table.unit_loss(store, unit, spec)
    return replace(table, predicted=priced)


class LayerGradients:
    """Predicts the KL of every unit in every format. store: of quantized units. specs: below 16 bits, or left out."""

    def __init__(
        self,
        lowering: Lowering,
        store: StreamedStore,
        specs: Sequence[QuantSpec],
        journal: Journal,
        threads: int,
        elsewhere: PriceElsewhere | None = None,
    ) -> None:
        """elsewhere: other machines that price experts; None: this one does."""
        self._elsewhere = elsewhere
        self._slot, self._model, self._store = LayerSlot(lowering), lowering.model, store
        self._specs, self._journal, self._threads, self._trace = list(specs), journal, threads, _Trace()
        self._texts, self._scored, self._names = TextStates([], [], []), list[int](), list[int]()

    def run(self, pairs: Sequence[TokenPair], seed: int, progress: Progress) -> np.ndarray:
        """Predicted KL in nats per answer token, as FisherProxy.run gives it of the same texts; seed: of the sketches.

        pairs: of token ids, the first that GRADIENT_TOKENS hold; of one text at most TOKENS_PER_TEXT are asked.
        progress: (layers done, layers in all), each layer passed twice.
        """
        self._choose(pairs)
        total, last = 2 * self._model.num_layers, self._model.num_layers - 1
        with workers(self._threads) as pool:
            layer, upstream = self._take_over()
            if layer == last and upstream is None:
                self._forward(pool, lambda done: progress(done, total))
            if upstream is None:
                upstream = self._at_the_end(pool, seed) if layer >= 0 else []
            for at in range(layer, -1, -1):
                upstream = self._layer(at, upstream, pool)
                progress(total - at, total)
        found = [self._journal.arrays(f"gradients-{at}", dict)["squares"] for at in range(last + 1)]
        return np.concatenate(found) / (2 * SKETCHES * max(sum(self._scored), 1))

    def _choose(self, pairs: Sequence[TokenPair]) -> None:
        longest = min(TOKENS_PER_TEXT, self._model.max_positions)
        rows, _, scored = forced_rows([shortened(pair, longest) for pair in pairs], self._model.eos_token_ids[:1])
        room = GRADIENT_TOKENS
        for at, (row, count) in enumerate(zip(rows, scored, strict=True)):
            if count and len(row) <= room:
                room -= len(row)
                self._texts.rows.append(list(row))
                self._scored.append(count)
                self._names.append(at)
        self._texts.batches = length_batches([len(row) for row in self._texts.rows], TOKENS_PER_BACKWARD)

    # -- there ---------------------------------------------------------------------------------------------------------

    def _forward(self, pool: Workers, step: Callable[[int], None]) -> None:
        """All layers once, from where a killed run was; the stream in front of each, and behind the last, on disk."""
        layers, whole = self._model.num_layers, 0
        while whole <= layers and self._journal.read_stream(f"before-{whole}") is not None:
            whole += 1
        if whole > layers:
            return
        states = self._read(f"before-{whole - 1}") if whole else None
        if states is None:
            states, whole = self._embedded(), 1
            self._write("before-0", states)
        own = TextStates(self._texts.rows, self._texts.batches, states)
        for layer in range(whole - 1, layers):
            self._slot.load(layer)
            self._slot.run([own], pool, lambda: None)
            self._write(f"before-{layer + 1}", own.states)
            step(layer + 1)

    def _embedded(self) -> list[Tensor]:
        table = self._slot.embedding()
        rows = [[self._texts.rows[index] for index in batch] for batch in self._texts.batches]
        return [self._slot.embed(padded(batch)[0], table) for batch in rows]

    def _write(self, stage: str, states: Sequence[Tensor]) -> None:
        with self._journal.stream(stage) as file:
            for state in states:
                file.write(memoryview(state.contiguous().numpy().tobytes()))

    def _read(self, stage: str, shape: tuple[int, ...] = ()) -> list[Tensor] | None:
        """What `_write` wrote for every batch, each [*shape, B, T, D]; None if it is not there."""
        stored, start, found = self._journal.read_stream(stage), 0, []
        if stored is None:
            return None
        for batch in self._texts.batches:
            width = max(len(self._texts.rows[index]) for index in batch)
            size = [*shape, len(batch), width, self._model.hidden_size]
            count = 4 * int(np.prod(size))
            found.append(torch.from_numpy(stored.read(start, count).view(np.float32).copy()).view(size))
            start += count
        return found

    # -- and back ------------------------------------------------------------------------------------------------------

    def _take_over(self) -> tuple[int, list[Tensor] | None]:
        """The next layer to go through, from the last on, and the gradients behind it if a killed run left them."""
        layer = self._model.num_layers - 1
        while layer >= 0 and self._journal.get(f"gradients-{layer}") is not None:
            layer -= 1
        done = layer + 1
        if done == self._model.num_layers:
            return layer, None
        upstream = self._read(f"upstream-{done}", (SKETCHES,)) if done else []
        missing = [at for at in range(done) if self._journal.read_stream(f"before-{at}") is None]
        return (layer, upstream) if upstream is not None and not missing else (self._model.num_layers - 1, None)

    def _at_the_end(self, pool: Workers, seed: int) -> list[Tensor]:
        """Gradients of the sketches at what the last layer made of each batch, [SKETCHES, B, T, D]."""
        states, head = self._read(f"before-{self._model.num_layers}"), self._slot.head()
        if states is None:
            raise RuntimeError("the states behind the last layer were written and cannot be read")
        jobs = zip(self._texts.batches, states, strict=True)
        return list(pool.in_order(lambda job: self._at_logits(*job, head, seed), jobs))

    def _at_logits(self, batch: Sequence[int], states: Tensor, head: OutputHead, seed: int) -> Tensor:
        hidden = states.requires_grad_()
        spans = [
            row[len(self._texts.rows[at]) - self._scored[at] : len(self._texts.rows[at])]
            for row, at in zip(hidden, batch, strict=True)
        ]
        normed = self._slot.normed(torch.cat(spans))
        logits, found = head.logits(normed.detach()), []
        for number in range(SKETCHES):
            vector = sketch(logits, [seed, self._names[batch[0]], number])
            behind = head.back(vector)
            found.append(torch.autograd.grad(normed, hidden, behind, retain_graph=number + 1 < SKETCHES)[0])
        return torch.stack(found)

    def _layer(self, layer: int, upstream: list[Tensor], pool: Workers) -> list[Tensor]:
        """Gradients in front of a layer; what its units cost is in the journal afterwards."""
        before = self._read(f"before-{layer}")
        if before is None:
            raise RuntimeError(f"the states in front of layer {layer} were written and cannot be read")
        self._slot.load(layer)
        with self._tracing():
            # Taken out as they are used: what goes in and what comes out are as large, and not held together.
            jobs = ((before.pop(0), upstream.pop(0)) for _ in self._texts.batches)
            passes = list(pool.in_order(lambda job: self._back(*job), jobs))
        squares = np.full((len(layer_units(self._model, layer)), len(self._specs)), np.nan)
        found, parts = [gradients for gradients, _ in passes], [handed for _, handed in passes if handed is not None]
        del passes
        if parts:
            self._price(layer, self._together(parts), squares, pool)
        self._write(f"upstream-{layer}", found)
        self._journal.arrays(f"gradients-{layer}", lambda: {"squares": squares})
        for stage in (f"before-{layer + 1}", f"upstream-{layer + 1}"):
            self._journal.forget(stage)  # the next layer needs neither
        return found

    def _back(self, states: Tensor, upstream: Tensor) -> tuple[Tensor, HandedTokens | None]:
        """One batch: gradients in front of the layer [SKETCHES, B, T, D], and what its experts were handed."""
        entering = states.requires_grad_()
        self._trace.handed = None
        out = self._slot.network.backbone(inputs_embeds=entering, use_cache=False).last_hidden_state
        traced, self._trace.handed = self._trace.handed, None
        wanted = [entering] if traced is None else [entering, traced[3]]
        found = [
            torch.autograd.grad(out, wanted, behind, retain_graph=number + 1 < len(upstream))
            for number, behind in enumerate(upstream)
        ]
        gradients = torch.stack([own[0] for own in found])
        if traced is None:
            return gradients, None
        inputs, chosen, weights, _ = traced
        return gradients, HandedTokens(inputs.detach(), chosen, weights.detach(), [own[1] for own in found])

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        """Experts that note what they are handed, while this lasts."""

        def experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            total = recorded_experts([], 0, module, hidden, chosen, weights)
            self._trace.handed = hidden, chosen, weights, total
            return total

        model = self._slot.network.model
        before = model.get_experts_implementation()
        ALL_EXPERTS_FUNCTIONS.register(_TRACED, experts)
        model.set_experts_implementation(_TRACED)
        try:
            yield
        finally:
            model.set_experts_implementation(before)

    # -- one layer's experts -------------------------------------------------------------------------------------------

    def _together(self, parts: list[HandedTokens]) -> HandedTexts:
        """The real tokens of all batches; `parts` are emptied."""
        real, texts = self._real_tokens()
        inputs = torch.cat([part.inputs for part in parts])[real]
        gradients = [torch.cat([part.gradients.pop(0) for part in parts])[real] for _ in range(SKETCHES)]
        chosen, weights = (torch.cat([getattr(part, name) for part in parts])[real] for name in ("chosen", "weights"))
        parts.clear()
        return HandedTexts(HandedTokens(inputs, chosen, weights, gradients), texts, len(self._texts.rows))

    def _price(self, layer: int, handed: HandedTexts, squares: np.ndarray, pool: Workers) -> None:
        """Fill in squares [U, S], experts side by side."""

        def one(expert: int) -> np.ndarray:
            unit_of = partial(UnitKey, layer, expert)
            return expert_squares(self._slot.experts, unit_of, handed, self._specs, self._store.weight)

        experts = range(self._model.layers[layer].experts.count)
        if self._elsewhere is None:
            results = pool.in_order(one, experts)
        else:
            results = self._elsewhere(self._store, layer, handed, self._specs)
        for expert, found in zip(experts, results, strict=True):
            squares[len(PROJECTIONS) * expert : len(PROJECTIONS) * (expert + 1)] = found

    def _real_tokens(self) -> tuple[Tensor, Tensor]:
        """Which places of all batches, flat, hold tokens; and the text of each of those, [N]."""
        real, texts = [], []
        for batch in self._texts.batches:
            lengths = torch.tensor([len(self._texts.rows[index]) for index in batch])
            own = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
            real.append(own.reshape(-1))
            texts.append(torch.tensor(batch).repeat_interleave(lengths))
        return torch.cat(real), torch.cat(texts)
