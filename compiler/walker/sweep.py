"""One sweep over the layers: calibration, quantization, and how much each layer's errors move the model's answers.

While layer l is loaded, the calibration texts pass it and leave their routes, second moments and samples; its experts
are quantized in every format; and a few probe texts pass it once more with the attention, then with all experts, in a
probe format. These variants go on through the later layers beside the unchanged texts, and behind the last one their KL
tells what the errors of layer l cost: gain = KL / cost. After every layer all that a resumed run needs is on disk.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moec.evaluation.text_pairs import TokenPair
from moec.manifests.model import PROJECTIONS, UnitKey
from moec.manifests.progress import Progress
from moec.manifests.quant import QuantSpec
from moec.profiles.freed_memory import give_back_freed_memory

from ..calibration.collect import (
    HELD_OUT_SHARE,
    UNIMPORTANCE_BINS,
    ActivationStatistics,
    Routes,
    count_statistics,
    texts_digest,
    weight_summary,
)
from ..calibration.second_moments import SecondMoments
from ..families import Lowering
from ..quantization.quantized import LEFT_OUT
from ..reference.network import TOKENS_PER_FORWARD, length_batches
from ..sensitivity.sensitivity import PROBE_BITWIDTH, SensitivityTable, dense_groups, nearest_format
from ..workspace.journal import Journal
from ..workspace.parallel import Workers, workers
from .slot import LayerSlot, TextStates, divergence, log_probs
from .store import StreamedStore, layer_units, packed_layer, stage_name
from .units import Elsewhere, ExpertInputs, LayerInputs, LayerQuantizer

PROBE_TOKENS = 512
"""Tokens of the texts that carry the variants; there are two or three variants per layer."""
_DENSE_PARTS = ("attention", "shared")


@dataclass(frozen=True, slots=True)
class AnswerTexts:
    """Texts whose answers are scored: token rows, how many of the last tokens of each count, the pairs behind them."""

    rows: list[list[int]]
    counts: list[int]
    pairs: list[TokenPair]

    def add(self, other: AnswerTexts) -> None:
        """Put the texts of another task behind these."""
        self.rows.extend(other.rows)
        self.counts.extend(other.counts)
        self.pairs.extend(other.pairs)


@dataclass(frozen=True, slots=True)
class SweepInputs:
    """Texts of one sweep. calibration: token rows; answers: what trials measure; held_out: by task, for certificates.

    specs: formats below 16 bits offered to units. dense_probe: formats of dense weights that their gains are
    measured at.
    """

    calibration: list[list[int]]
    answers: AnswerTexts
    held_out: Mapping[str, AnswerTexts]
    specs: tuple[QuantSpec, ...]
    dense_probe: Mapping[str, QuantSpec]
    quantizer: str
    seed: int

    @property
    def probe(self) -> list[list[int]]:
        """The first calibration texts, of about PROBE_TOKENS."""
        ends = np.cumsum([len(row) for row in self.calibration])
        return self.calibration[: max(1, int(np.searchsorted(ends, PROBE_TOKENS, side="right")))]


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep found. answers, held_out: normed residual stream of the unchanged model, scored tokens, [A, D]."""

    statistics: ActivationStatistics
    sensitivity: SensitivityTable
    store: StreamedStore
    answers: Tensor
    held_out: Mapping[str, Tensor]


@dataclass(slots=True)
class _Travellers:
    """All texts that pass a layer, and the variants by name."""

    calibration: TextStates
    answers: TextStates
    held_out: dict[str, TextStates]
    probe: TextStates
    variants: dict[str, TextStates] = field(default_factory=dict)

    def all(self) -> list[TextStates]:
        return [self.calibration, *self.unchanged(), *self.variants.values()]

    def unchanged(self) -> list[TextStates]:
        """Texts that pass the checkpoint's own weights and leave nothing behind."""
        return [self.answers, *self.held_out.values(), self.probe]


class _Capture:
    """Keeps what the experts of the slot are handed, apart for every thread."""

    def __init__(self, slot: LayerSlot) -> None:
        self._slot, self._local = slot, threading.local()
        self._handle = slot.experts.register_forward_pre_hook(self._keep)

    def _keep(self, module: Any, arguments: tuple[Tensor, Tensor, Tensor]) -> None:
        self._local.arguments = arguments[:3]

    def forward(self, states: Tensor, real: Tensor) -> tuple[Tensor, ExpertInputs]:
        """A batch through the layer, and what its real tokens handed to the experts."""
        out = self._slot.forward(states)
        with torch.inference_mode():
            inputs, chosen, weights = (argument[real].clone() for argument in self._local.arguments)
        return out, ExpertInputs(inputs, chosen, weights)

    def close(self) -> None:
        self._handle.remove()


def calibrate_layer(
    slot: LayerSlot, layer: int, texts: TextStates, pool: Workers, has_moments: bool
) -> tuple[LayerInputs, dict[str, np.ndarray]]:
    """Move texts through the loaded layer. Returns what they left, and what is counted of them.

    routes: [T, K]; weights: [T, 2], and unimportance: calibration.weight_summary.
    """
    inputs = LayerInputs(slot.model.layers[layer].experts, slot.model.hidden_size, has_moments)
    module = slot.experts
    capture = _Capture(slot)
    routes, weights, unimportance = [], [], np.zeros(UNIMPORTANCE_BINS, np.int64)
    try:
        jobs = [(state, texts.real(at)) for at, state in enumerate(texts.states)]
        # Passes side by side; what they leave is added batch after batch, while the next ones run.
        for at, (state, handed) in enumerate(pool.in_order(lambda job: capture.forward(*job), jobs)):
            texts.states[at] = state
            inputs.add(module, handed, pool)
            routes.append(handed.chosen.numpy().astype(np.uint16))
            summary, counts = weight_summary(handed.weights)
            weights.append(summary.numpy())
            unimportance += counts
    finally:
        capture.close()
    counted = {"routes": np.concatenate(routes), "weights": np.concatenate(weights), "unimportance": unimportance}
    return inputs, counted


class Sweep:
    """Runs the sweep; see the module."""

    def __init__(
        self,
        lowering: Lowering,
        inputs: SweepInputs,
        journal: Journal,
        threads: int,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """elsewhere: other machines that quantize experts; None: this one does."""
        self._lowering, self._inputs, self._journal, self._threads = lowering, inputs, journal, threads
        self._elsewhere = elsewhere
        self._model = lowering.model
        self._slot = LayerSlot(lowering)
        self._store = StreamedStore(lowering, inputs.quantizer, inputs.specs, journal)
        self._found: list[dict[str, np.ndarray]] = []

    def run(self, progress: Progress) -> SweepResult:
        """All layers; progress: (steps done, steps in all)."""
        done = self._take_over()
        travellers, total = self._begin(done), self._model.num_layers
        with ExitStack() as stack:
            pool = stack.enter_context(workers(self._threads))
            progress(done, total)
            for layer in range(done, total):
                self._found.append(self._layer(layer, travellers, pool))
                self._save(layer, travellers)
                progress(layer + 1, total)
            sensitivity = self._sensitivity(travellers)
        answers = self._slot.normed(travellers.answers.answers(self._inputs.answers.counts))
        held_out = {
            task: self._slot.normed(travellers.held_out[task].answers(texts.counts))
            for task, texts in self._inputs.held_out.items()
        }
        return SweepResult(self._statistics(), sensitivity, self._store, answers, held_out)

    # -- what a killed run has left --------------------------------------------------------------------------------

    def _take_over(self) -> int:
        """Layers that are done, with the states behind the last of them."""
        for layer in range(self._model.num_layers):
            if self._journal.get(f"layer-{layer}") is None:
                break
            found = self._journal.arrays(f"layer-{layer}", dict)
            if not self._store.add_layer(layer, found["costs"]):
                break
            self._found.append(found)
        while self._found and self._journal.read_stream(f"states-{len(self._found) - 1}") is None:
            self._found.pop()
        return len(self._found)

    def _begin(self, done: int) -> _Travellers:
        """Texts in front of the first layer, or behind the last layer that is done."""
        inputs, slot = self._inputs, self._slot
        probe = TextStates.begin(inputs.probe, slot.embed)
        travellers = _Travellers(
            TextStates.begin(inputs.calibration, slot.embed),
            TextStates.begin(inputs.answers.rows, slot.embed),
            {task: TextStates.begin(texts.rows, slot.embed) for task, texts in inputs.held_out.items()},
            probe,
        )
        if self._is_probed("embedding"):
            weight = self._store.dense_weight("embedding", inputs.dense_probe["embedding"])
            travellers.variants["embedding"] = TextStates.begin(inputs.probe, lambda ids: slot.embed(ids, weight))
        if not done:
            return travellers
        for layer in range(done):
            travellers.variants.update({name: probe.copy() for name in self._variant_names(layer)})
        stored, start = self._journal.read_stream(f"states-{done - 1}"), 0
        if stored is None:
            raise RuntimeError("the states were checked")
        for text in travellers.all():
            for at, state in enumerate(text.states):
                size = state.numel() * state.element_size()
                text.states[at] = torch.from_numpy(stored.read(start, size).view(np.float32).copy()).view(state.shape)
                start += size
        return travellers

    def _save(self, layer: int, travellers: _Travellers) -> None:
        """The states behind a layer first, then its results: what says that the layer is done."""
        with self._journal.stream(f"states-{layer}") as file:
            for text in travellers.all():
                for state in text.states:
                    file.write(memoryview(state.contiguous().numpy().tobytes()))
        self._journal.arrays(f"layer-{layer}", lambda: self._found[layer])
        if layer:
            self._journal.forget(f"states-{layer - 1}")

    # -- one layer -------------------------------------------------------------------------------------------------

    def _layer(self, layer: int, travellers: _Travellers, pool: Workers) -> dict[str, np.ndarray]:
        slot, before = self._slot, travellers.probe.copy()
        slot.load(layer)
        variants: dict[str, TextStates] = {}
        groups = [f"layers.{layer}.{part}" for part in _DENSE_PARTS if self._is_probed(f"layers.{layer}.{part}")]
        if slot.experts is None:
            slot.run(travellers.all(), pool, lambda: None)
            variants = {group: self._with_dense_probe(layer, group, before.copy(), pool) for group in groups}
            travellers.variants.update(variants)
            return {"costs": np.zeros((0, len(self._store.specs) + 1))}
        has_moments = self._inputs.quantizer == "gptq"
        inputs, counted = calibrate_layer(slot, layer, travellers.calibration, pool, has_moments)
        slot.run([*travellers.unchanged(), *travellers.variants.values()], pool, lambda: None)
        variants = {group: self._with_dense_probe(layer, group, before.copy(), pool) for group in groups}
        costs, is_changed = self._quantize(layer, inputs, pool)
        if is_changed:
            variants[f"layers.{layer}.experts"] = before
            slot.run([before], pool, lambda: None)
        travellers.variants.update(variants)
        return {**counted, "costs": costs, "tokens": inputs.tokens.numpy()}

    def _with_dense_probe(self, layer: int, group: str, texts: TextStates, pool: Workers) -> TextStates:
        """Texts through the layer with one group of its dense weights in the probe format."""
        names = next(g.tensors for g in dense_groups(self._model) if g.name == group)
        for name in names:
            self._slot.set(layer, name, self._store.dense_weight(name, self._inputs.dense_probe[name]))
        self._slot.run([texts], pool, lambda: None)
        for name in names:
            self._slot.set(layer, name, self._lowering.dense_weight(name))
        return texts

    def _quantize(self, layer: int, inputs: LayerInputs, pool: Workers) -> tuple[np.ndarray, bool]:
        """Quantize, write, and leave the slot with all experts in the probe format.

        Returns the costs, float64 [units, specs + 1] as StreamedStore has them, and whether a probe format fits.
        """
        module = self._slot.experts
        units, specs = layer_units(self._model, layer), self._store.specs
        priced = (*specs, LEFT_OUT)
        costs, is_changed = np.full((len(units), len(priced)), np.inf), False
        row_of = {unit: row for row, unit in enumerate(units)}
        quantizer = LayerQuantizer(module, layer, self._inputs.quantizer, specs, self._elsewhere)
        give_back_freed_memory()
        with ExitStack() as stack:
            files = {spec: stack.enter_context(self._journal.stream(stage_name(layer, spec))) for spec in specs}
            for expert, matrices, found in quantizer.run(inputs, pool):
                for (unit, spec), cost in found.items():
                    costs[row_of[unit], priced.index(spec)] = cost
                for projection in PROJECTIONS:
                    unit = UnitKey(layer, expert, projection)
                    for spec, file in files.items():
                        file.write(packed_layer(self._model, matrices, unit, spec))
                    probe = self._probe_spec(unit)
                    if probe is not None:
                        self._slot.set(layer, unit, matrices[(unit, probe)].dequantize())
                        is_changed = True
                give_back_freed_memory()
        if not self._store.add_layer(layer, costs):
            raise RuntimeError(f"layer {layer} was written and cannot be read")
        return costs, is_changed

    # -- what it adds up to ----------------------------------------------------------------------------------------

    def _probe_spec(self, unit: UnitKey) -> QuantSpec | None:
        columns = self._model.unit_shape(unit.layer, unit.projection)[1]
        fitting = [spec for spec in self._store.specs if spec.fits(columns)]
        return nearest_format(fitting, PROBE_BITWIDTH) if fitting else None

    def _is_probed(self, group: str) -> bool:
        names = next((g.tensors for g in dense_groups(self._model) if g.name == group), ())
        return any(self._inputs.dense_probe[name].bitwidth < 16 for name in names)

    def _variant_names(self, layer: int) -> list[str]:
        """Variants that a layer begins, in their order."""
        names = [f"layers.{layer}.{part}" for part in _DENSE_PARTS if self._is_probed(f"layers.{layer}.{part}")]
        has_probe = any(self._probe_spec(unit) is not None for unit in layer_units(self._model, layer))
        return [*names, *([f"layers.{layer}.experts"] if has_probe else [])]

    def _statistics(self) -> ActivationStatistics:
        rows = self._inputs.calibration
        batches = length_batches([len(row) for row in rows], TOKENS_PER_FORWARD)
        texts = np.array([index for batch in batches for index in batch for _ in rows[index]])
        routed = [self._found[layer] for layer in self._model.expert_layers]
        routes = np.stack([found["routes"] for found in routed], axis=1)
        weights = np.stack([found["weights"] for found in routed], axis=1)
        none = np.zeros(0, np.int64)
        counts = [torch.from_numpy(np.array(found.get("tokens", none))) for found in self._found]
        empty = [torch.empty(0)] * len(counts)
        held_out = texts < round(HELD_OUT_SHARE * len(rows))
        moments = SecondMoments(empty, empty, counts)
        decoder = Routes(np.array(self._model.expert_layers), routes, weights, held_out)
        unimportance = np.zeros((self._model.num_layers, UNIMPORTANCE_BINS), np.int64)
        unimportance[list(self._model.expert_layers)] = [found["unimportance"] for found in routed]
        return count_statistics(self._model, moments, decoder, texts_digest(rows), self._inputs.seed, unimportance)

    def _sensitivity(self, travellers: _Travellers) -> SensitivityTable:
        """Gains from the KL of every variant on the probe texts."""
        gains = np.zeros((self._model.num_layers, len(PROJECTIONS)))
        dense_gains = {group.name: 0.0 for group in dense_groups(self._model)}
        groups = {group.name: group.tensors for group in dense_groups(self._model)}
        for name, kl in self._variant_divergences(travellers).items():
            if name.endswith(".experts"):
                layer = int(name.split(".")[1])
                cost = sum(
                    self._store.error(unit, spec)
                    for unit in layer_units(self._model, layer)
                    if (spec := self._probe_spec(unit)) is not None
                )
                gains[layer, :] = kl / cost if cost > 0 else 0.0
            else:
                dense_gains[name] = self._dense_gain(groups[name], kl)
        width = max(layer.experts.count for layer in self._model.layers)
        return SensitivityTable(gains, dense_gains, np.ones((self._model.num_layers, width)))

    def _variant_divergences(self, travellers: _Travellers) -> dict[str, float]:
        """Mean KL of every variant to the unchanged model, nats per token; the head's own variant among them."""
        head, own = self._slot.head(), travellers.probe.tokens()
        variants = {name: (texts.tokens(), head) for name, texts in travellers.variants.items()}
        if "lm_head" in self._model.dense_shapes() and self._is_probed("lm_head"):
            matrix = self._store.dense_weight("lm_head", self._inputs.dense_probe["lm_head"])
            variants["lm_head"] = own, replace(head, matrix=matrix)
        totals = dict.fromkeys(variants, 0.0)
        for tokens, log_p in log_probs(self._slot.normed(own), head):
            for name, (states, other) in variants.items():
                kl, _ = divergence(log_p, self._slot.normed(states[tokens]), other)
                totals[name] += float(kl.double().sum())
        return {name: total / len(own) for name, total in totals.items()}

    def _dense_gain(self, names: Sequence[str], kl: float) -> float:
        cost = sum(self._store.dense_error(name, self._inputs.dense_probe[name]) for name in names)
        return kl / cost if cost > 0 else 0.0
