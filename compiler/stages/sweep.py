"""One sweep over the layers: calibration, quantization, and the effect of each layer's errors on the model's answers.

While a layer is loaded:
1. The calibration texts pass it. They leave routes, second moments and samples.
2. Its experts are quantized in every format.
3. Probe texts pass it once more: with the attention in a probe format, then with all experts in one.

These variants go on through the later layers, next to the unchanged texts. After the last layer, their KL is what the
errors of that layer cost: gain = KL / cost. After each layer, everything that a resumed run needs is on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from moec.manifests.model import PROJECTIONS, UnitKey
from moec.manifests.progress import Progress
from moec.manifests.quant import QuantSpec

from ..calibration.activation_paths import DEFAULT_PATH_KEYS, PathKeys
from ..calibration.collect import ActivationStatistics, count_statistics
from ..calibration.layer_inputs import LayerInputs, calibrate_layer
from ..quantization.layer_quantizer import ExpertQuantizer, LayerQuantizer, QuantizeElsewhere
from ..quantization.own_codes import exact_matrices
from ..quantization.quantizers import WITH_MOMENTS
from ..quantization.swept_store import SweptStore, packed_unit, stage_name
from ..sensitivity.sensitivity import SensitivityTable, dense_groups, probe_format
from ..walker.loaded_layer import LoadedLayer, embedded
from ..walker.output_head import divergence, head_workers
from ..walker.texts import TextStates
from ..workspace.journal import Journal
from ..workspace.parallel import Workers, workers
from .encode_texts import CompileTexts

_EXPERTS = "experts"
_DENSE_PARTS = ("attention", "shared")


@dataclass(frozen=True, slots=True)
class Swept:
    """Results of a sweep.

    statistics: counts of calibration; None without texts.
    sensitivity: measured gains; ones without texts.
    answers, held_out: normed residual stream of the unchanged model at scored tokens, [A, D].
    """

    statistics: ActivationStatistics | None
    sensitivity: SensitivityTable
    answers: Tensor
    held_out: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Variant:
    """The model with one part in its probe format.

    part: experts, attention or shared of a layer; embedding or lm_head.
    layer: None for a part outside the layers.
    """

    part: str
    layer: int | None = None

    @property
    def group(self) -> str:
        """Name of the dense group that the part is, if it has no experts."""
        return self.part if self.layer is None else f"layers.{self.layer}.{self.part}"


@dataclass(slots=True)
class _Travellers:
    """All texts that pass the layers, and the probe texts under each variant."""

    calibration: TextStates
    validation: TextStates
    held_out: dict[str, TextStates]
    probe: TextStates
    variants: dict[_Variant, TextStates] = field(default_factory=dict)

    def all(self) -> list[TextStates]:
        return [self.calibration, *self.unchanged(), *self.variants.values()]

    def unchanged(self) -> list[TextStates]:
        """Texts that pass the checkpoint's own weights, and of which nothing is counted."""
        return [self.validation, *self.held_out.values(), self.probe]


class Sweep:
    """Runs the sweep, see the head of this file.

    slot: loads the layers.
    store: takes the quantized units.
    dense_probe: format of each dense weight in which its gain is measured. Empty: no gains are measured.
    seed: seed of the choice of texts.
    elsewhere: other machines that quantize experts, or None for the threads of this process.
    """

    def __init__(
        self,
        slot: LoadedLayer,
        store: SweptStore,
        journal: Journal,
        dense_probe: Mapping[str, QuantSpec],
        seed: int,
        elsewhere: QuantizeElsewhere | None = None,
    ) -> None:
        self._slot, self._store, self._journal, self._elsewhere = slot, store, journal, elsewhere
        self._model, self._dense_probe, self._seed = slot.model, dense_probe, seed
        self._groups = {group.name: group.tensors for group in dense_groups(self._model)}
        self._done: list[dict[str, np.ndarray]] = []  # what the journal keeps of each layer: see `_pass_layer`

    def run(
        self,
        texts: CompileTexts | None,
        threads: int,
        progress: Progress,
        path_keys: PathKeys = DEFAULT_PATH_KEYS,
    ) -> Swept:
        """Pass all layers. Without texts, units are quantized without knowledge of their inputs.

        progress: called with (layers done, layers in all).
        path_keys: keys of the path tables, see `count_statistics`.
        """
        total = self._model.num_layers
        with workers(threads) as pool:
            done = self._take_over(has_states=texts is not None)
            travellers = None if texts is None else self._begin(texts)
            if travellers is not None and done:
                self._restore(travellers, done)
            progress(done, total)
            for layer in range(done, total):
                self._done.append(self._pass_layer(layer, travellers, pool))
                self._save(layer, travellers)
                progress(layer + 1, total)
            if texts is None or travellers is None:
                return Swept(None, self._table_of_ones(), torch.empty(0), {})
            sensitivity = self._sensitivity(travellers, threads) if self._dense_probe else self._table_of_ones()
        answers = self._slot.normed(travellers.validation.scored_states(texts.validation.counts))
        held_out = {
            task: self._slot.normed(travellers.held_out[task].scored_states(answers_of_task.counts))
            for task, answers_of_task in texts.held_out.items()
        }
        statistics = count_statistics(self._model, texts.calibration, self._seed, self._done, path_keys)
        return Swept(statistics, sensitivity, answers, held_out)

    # -- the remains of a killed run -----------------------------------------------------------------------------------

    def _take_over(self, has_states: bool) -> int:
        """Return the number of layers that are done. The states after the last of them are stored."""
        for layer in range(self._model.num_layers):
            if self._journal.get(f"layer-{layer}") is None:
                break
            results = self._journal.arrays(f"layer-{layer}", dict)
            if not self._store.add_layer(layer, results["costs"]):
                break
            self._done.append(results)
        while has_states and self._done and self._journal.read_stream(f"states-{len(self._done) - 1}") is None:
            self._done.pop()
        return len(self._done)

    def _begin(self, texts: CompileTexts) -> _Travellers:
        """Return the texts before the first layer."""
        embed = self._slot.embed
        travellers = _Travellers(
            TextStates.begin(texts.calibration, embed),
            TextStates.begin(texts.validation.texts, embed),
            {task: TextStates.begin(answers.texts, embed) for task, answers in texts.held_out.items()},
            TextStates.begin(texts.probe, embed),
        )
        embedding = _Variant("embedding")
        if self._is_probed(embedding):
            table = self._store.dense_weight("embedding", self._dense_probe["embedding"])
            scale = self._model.embedding_scale
            travellers.variants[embedding] = TextStates.begin(texts.probe, lambda ids: embedded(ids, table, scale))
        return travellers

    def _restore(self, travellers: _Travellers, done: int) -> None:
        """Give texts before the first layer, and the variants of the layers that are done, their stored states."""
        for layer in range(done):
            travellers.variants.update({variant: travellers.probe.copy() for variant in self._variants(layer)})
        if done > self._model.first_decoder_layer:
            for text in travellers.all():
                if text.is_encoding:
                    text.begin_decoding(self._slot.encoder_normed)
        stored, start = self._journal.read_stream(f"states-{done - 1}"), 0
        if stored is None:
            raise RuntimeError("the states were checked")
        for text in travellers.all():
            for states, at in text.tensors():
                size = states[at].numel() * states[at].element_size()
                states[at] = torch.from_numpy(stored.read(start, size).view(np.float32).copy()).view(states[at].shape)
                start += size

    def _save(self, layer: int, travellers: _Travellers | None) -> None:
        """Store the states after a layer, then its results. The results mark the layer as done."""
        if travellers is not None:
            with self._journal.stream(f"states-{layer}") as file:
                for text in travellers.all():
                    for states, at in text.tensors():
                        file.write(memoryview(states[at].contiguous().numpy().tobytes()))
        self._journal.arrays(f"layer-{layer}", lambda: self._done[layer])
        if layer and travellers is not None:
            self._journal.forget(f"states-{layer - 1}")

    # -- one layer -----------------------------------------------------------------------------------------------------

    def _pass_layer(self, layer: int, travellers: _Travellers | None, pool: Workers) -> dict[str, np.ndarray]:
        """Load a layer, move all texts through it, quantize its experts, and begin its variants.

        Returns what the journal keeps: the counts of calibration, and `costs`, those of SweptStore.add_layer.
        """
        self._slot.load(layer)
        if travellers is None:
            return {"costs": self._quantize(layer, None, pool)}
        for text in travellers.all():
            self._slot.begin_stack(text)
        probe = travellers.probe.copy()
        counts, inputs = self._pass_texts(travellers, pool)
        dense = [variant for variant in self._variants(layer) if variant.part != _EXPERTS]
        begun = {variant: self._with_dense_probe(variant, probe.copy(), pool) for variant in dense}
        costs = self._quantize(layer, inputs, pool)
        if self._has_probe(layer):
            self._slot.run([probe], pool)  # all experts are in their probe format now
            begun[_Variant(_EXPERTS, layer)] = probe
        travellers.variants.update(begun)
        return {**counts, "costs": costs}

    def _pass_texts(self, travellers: _Travellers, pool: Workers) -> tuple[dict[str, np.ndarray], LayerInputs | None]:
        """Move all texts through the loaded layer. Returns the counts of calibration, and the inputs of the experts."""
        if self._slot.experts is None:
            self._slot.run(travellers.all(), pool)
            return {}, None
        has_moments = self._store.quantizer in WITH_MOMENTS
        inputs, counts = calibrate_layer(self._slot, travellers.calibration, pool, has_moments)
        self._slot.run([*travellers.unchanged(), *travellers.variants.values()], pool)
        return counts, inputs

    def _with_dense_probe(self, variant: _Variant, texts: TextStates, pool: Workers) -> TextStates:
        """Move texts through the layer with one group of its dense weights in the probe format."""
        names = self._groups[variant.group]
        for name in names:
            self._slot.set(name, self._store.dense_weight(name, self._dense_probe[name]))
        self._slot.run([texts], pool)
        for name in names:
            self._slot.set(name, self._slot.own(name))
        return texts

    def _quantize(self, layer: int, inputs: LayerInputs | None, pool: Workers) -> np.ndarray:
        """Quantize the experts of a layer and write them. They stay in the slot in their probe format.

        Returns the costs as SweptStore.add_layer takes them.
        """
        units, specs, priced = self._model.units_of_layer(layer), self._store.specs, self._store.priced_specs
        costs = np.full((len(units), len(priced)), np.inf)
        if units:
            row_of = {unit: row for row, unit in enumerate(units)}
            quantizer = ExpertQuantizer(layer, self._store.quantizer, specs)
            self._slot.give_back_memory()
            with ExitStack() as stack:
                files = {spec: stack.enter_context(self._journal.stream(stage_name(layer, spec))) for spec in specs}
                exact = partial(exact_matrices, self._store.lowering)
                quantized = LayerQuantizer(self._slot.experts, quantizer, self._elsewhere, exact)
                for expert, matrices, expert_costs in quantized.run(inputs, pool):
                    for (unit, spec), cost in expert_costs.items():
                        costs[row_of[unit], priced.index(spec)] = cost
                    for unit in (unit for unit in units if unit.expert == expert):
                        for spec, file in files.items():
                            file.write(packed_unit(matrices, unit, spec, self._model))
                        probe = self._probe_spec(unit)
                        if probe is not None and (unit, probe) in matrices:
                            self._slot.set(unit, matrices[(unit, probe)].dequantize())
                    self._slot.give_back_memory()
        if not self._store.add_layer(layer, costs):
            raise RuntimeError(f"layer {layer} was written and cannot be read")
        return costs

    def _probe_spec(self, unit: UnitKey) -> QuantSpec | None:
        if not self._dense_probe:
            return None
        return probe_format(self._store.specs, self._model.unit_shape(unit.layer, unit.projection)[1])

    def _has_probe(self, layer: int) -> bool:
        return any(self._probe_spec(unit) is not None for unit in self._model.units_of_layer(layer))

    def _is_probed(self, variant: _Variant) -> bool:
        """Return whether a dense part exists and has a probe format below 16 bits."""
        names = self._groups.get(variant.group, ()) if self._dense_probe else ()
        return any(self._dense_probe[name].bitwidth < 16 for name in names)

    def _variants(self, layer: int) -> list[_Variant]:
        """Return the variants that begin in a layer, in their order."""
        dense = [_Variant(name, layer) for name in _DENSE_PARTS]
        experts = [_Variant(_EXPERTS, layer)] if self._has_probe(layer) else []
        return [*filter(self._is_probed, dense), *experts]

    # -- results -------------------------------------------------------------------------------------------------------

    def _table_of_ones(self) -> SensitivityTable:
        """Return gains of 1, so that plain errors of weights decide."""
        width = max(layer.experts.count for layer in self._model.layers)
        gains = np.ones((self._model.num_layers, len(PROJECTIONS)))
        return SensitivityTable(gains, dict.fromkeys(self._groups, 1.0), np.ones((self._model.num_layers, width)))

    def _sensitivity(self, travellers: _Travellers, threads: int) -> SensitivityTable:
        """Return gains from the KL of every variant on the probe texts."""
        table = self._table_of_ones()
        gains, dense_gains = np.zeros_like(table.gains), dict.fromkeys(self._groups, 0.0)
        for variant, kl in self._variant_divergences(travellers, threads).items():
            layer = variant.layer
            if variant.part == _EXPERTS and layer is not None:
                probes = ((unit, self._probe_spec(unit)) for unit in self._model.units_of_layer(layer))
                probed = [(unit, spec) for unit, spec in probes if spec is not None and self._store.holds(unit, spec)]
                cost = sum(self._store.error(unit, spec) for unit, spec in probed)
                columns = [PROJECTIONS.index(name) for name in self._model.layers[layer].experts.projections]
                gains[layer, columns] = kl / cost if cost > 0 else 0.0
            else:
                cost = sum(
                    self._store.dense_error(name, self._dense_probe[name]) for name in self._groups[variant.group]
                )
                dense_gains[variant.group] = kl / cost if cost > 0 else 0.0
        return replace(table, gains=gains, dense_gains=dense_gains)

    def _variant_divergences(self, travellers: _Travellers, threads: int) -> dict[_Variant, float]:
        """Return the mean KL of every variant to the unchanged model, nats per token. The head is a variant, too."""
        head, unchanged = self._slot.head(), travellers.probe.tokens()
        variants = {variant: (texts.tokens(), head) for variant, texts in travellers.variants.items()}
        output = _Variant("lm_head")
        if self._is_probed(output):
            matrix = self._store.dense_weight("lm_head", self._dense_probe["lm_head"])
            variants[output] = unchanged, head.with_matrix(matrix)

        def sums(tokens: slice) -> list[float]:
            log_p, divergences = head.logits(self._slot.normed(unchanged[tokens])).log_softmax(-1), []
            for states, other in variants.values():
                log_q = other.logits(self._slot.normed(states[tokens])).log_softmax(-1)
                divergences.append(float(divergence(log_p, log_q)[0].double().sum()))
            return divergences

        totals = np.zeros(len(variants))
        with head_workers(threads) as pool:
            for divergences in pool.in_order(sums, head.token_slices(len(unchanged))):
                totals += divergences
        return dict(zip(variants, (totals / len(unchanged)).tolist(), strict=True))


def sweep_dense_probe(options: Sequence[Mapping[str, QuantSpec]]) -> Mapping[str, QuantSpec]:
    """Return the formats of dense weights in which their gains are measured: those of the fewest bits on offer.

    options: formats of all dense weights, one mapping for each bitwidth.
    """
    return min(options, key=lambda specs: min(spec.bitwidth for spec in specs.values()))
