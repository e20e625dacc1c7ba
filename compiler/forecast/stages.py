"""Stages of a compile: the number of pieces in each, times the measured seconds of a piece.

Titles are those of the progress bars where a stage has a bar. Numbers that vary are given at their maximum: measured
plans and bytes on disk. The length of generated answers is unknown beforehand. It is assumed to be that of the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod

import torch

from moec.manifests.model import ModelSpec
from moec.manifests.quant import EXPERT_ALIGNMENT_BYTES, QuantSpec
from moec.manifests.runtime_limits import MAX_PASS_TOKENS

from ..checkpoint.checkpoint import DIGESTS_AT_ONCE
from ..preflight.preflight import reachable_bytes
from ..preflight.preparation import KL_ITEMS, Prepared
from ..reference.decode import ROWS_PER_STEP
from ..request.options import UNIFORM_DENSE_BITS
from ..request.uniform import uniform_spec
from ..search.bisect import CALIBRATING_KL, MAX_GENERATED, MAX_KL
from ..search.comparison_budget import (
    EDGEMOE_BITWIDTHS,
    UNIFORM,
    ItemCounts,
    active_layer_weights,
    active_weights,
    affordable,
    baseline_items,
    bisections,
)
from ..search.swaps import SWAPS
from ..sensitivity.exact import EXACT_ITEMS
from ..sensitivity.fisher import SKETCHES, TEXTS, asks_gradients
from ..sensitivity.sensitivity import dense_groups
from ..walker import planning
from ..walker.gradients import GRADIENT_TOKENS, TOKENS_PER_TEXT
from ..walker.memory import (
    PROCESS_BYTES,
    gradients_bytes,
    layer_weights,
    moment_values,
    streamed_bytes,
    variant_count,
    whole_bytes,
)
from ..walker.sweep import SweepInputs
from .answers import count_answers
from .rates import DiskRates, ExpertRates, LayerRates

_FLOAT = 4
_HALF = 2
_RESULTS_BYTES = 16 << 20  # statistics and measurements, small compared with second moments
_PLANS = {"loss": CALIBRATING_KL + MAX_GENERATED, "kl": MAX_KL}  # maximum of measured plans; other targets measure one


@dataclass(frozen=True, slots=True)
class StageForecast:
    """Forecast of one stage.

    title: name of the stage.
    seconds: wall time.
    memory_bytes: maximum memory of the process.
    disk_bytes: maximum disk next to the output.
    work: the work that takes the time.
    """

    title: str
    seconds: float
    memory_bytes: int
    disk_bytes: int
    work: str

    def to_json(self) -> dict[str, object]:
        """Return plain values."""
        return asdict(self)


def uniform_stages(prepared: Prepared, disk: DiskRates, rates: ExpertRates) -> list[StageForecast]:
    """Return the stages of `--uniform`."""
    model, options = prepared.lowering.model, prepared.request.options
    spec, experts = uniform_spec(options, prepared.lowering), len(model.expert_keys())
    dense = _dense_weights(model)
    written = _written_bytes(model, reachable_bytes(model, [spec])[0], options.dense_bits or UNIFORM_DENSE_BITS)
    seconds = experts * rates.expert + dense * rates.rounded_weight + written * disk.written_byte
    memory, work = _rounding_bytes(model), f"{experts:,} experts in {spec}, {written:,} bytes"
    return [_digests(prepared, disk), StageForecast("writing the bundle", seconds, memory, written, work)]


class SearchForecast:
    """The stages of a compile with a search, layer by layer or with the whole model in memory."""

    def __init__(self, prepared: Prepared, inputs: SweepInputs, disk: DiskRates, rates: LayerRates) -> None:
        self._prepared, self._inputs, self._disk, self._rates = prepared, inputs, disk, rates
        self._model, self._target = prepared.lowering.model, prepared.request.options.target.kind
        self._threads = torch.get_num_threads()
        self._plans = _PLANS.get(self._target, 1)
        if swaps := prepared.request.options.swaps:  # in addition to the start plan; a KL is bisected twice
            self._plans += swaps + 1 + (MAX_KL if self._target == "kl" else 0)
        self._held_out = _count(row for held in inputs.held_out.values() for row in held.rows)
        self._bundle = self._bundle_bytes()
        self._validation, self._test = count_answers(prepared)

    def layerwise(self) -> list[StageForecast]:
        """Return the stages of a compile layer by layer."""
        inputs, experts = self._inputs, len(self._model.expert_keys())
        work, answers = self._work_bytes(), _count(inputs.answers.rows)
        # For a loss, the disk also holds bundles of the checkpoint and of the tried plan.
        tried = self._weights() * _HALF + self._bundle if self._target == "loss" else 0
        options, tasks = self._prepared.request.options, len(self._prepared.splits)
        memory = planning.need_bytes(self._model, options, inputs.specs, self._threads, tasks)
        texts = _count(inputs.calibration) + answers + self._held_out
        passes = streamed_bytes(self._model, texts, inputs.specs, self._threads)
        stages = [
            _digests(self._prepared, self._disk),
            StageForecast(
                "calibrating and quantizing layer by layer",
                self._sweep_seconds() + work * self._disk.written_byte,
                passes,
                work,
                f"{_count(inputs.calibration):,} tokens, {experts:,} experts in {len(inputs.specs)} formats",
            ),
            *self._gradients(work),
            StageForecast(
                "measuring layer by layer",
                self._plans * self._plan_seconds(),
                passes,
                work,
                f"{_at_most(self._plans)}, {answers:,} tokens each",
            ),
            *([self._answers(memory, work + tried, self._streamed_seconds())] if tried else []),
            self._writing(passes, work + self._bundle),
        ]
        if not tried:
            seconds = self._held_out * (self._through_layers() + self._rates.logit_token)
            text = f"{self._held_out:,} held-out tokens"
            title = f"KL on {', '.join(inputs.held_out)}"
            stages.append(StageForecast(title, seconds, memory, work + self._bundle, text))
        return stages

    def whole(self, calibration_tokens: int) -> list[StageForecast]:
        """Return the stages of a compile with the whole model in memory.

        calibration_tokens: tokens of all train items.
        """
        model, rates, specs = self._model, self._rates, self._inputs.specs
        memory = whole_bytes(model, self._prepared.specs, self._threads)
        experts, scale = len(model.expert_keys()), self._scales()
        calibrating = calibration_tokens * rates.calibration_token * sum(scale)
        texts = sum(len(split.train.items) for split in self._prepared.splits)
        predicted = round(calibration_tokens * min(1.0, TEXTS / texts))
        # One forward pass; per sketch a backward pass of twice its work; per format the experts' part of a pass.
        passes = 1 + 2 * SKETCHES + len(specs) * self._share_of_experts()
        journal = _RESULTS_BYTES + _FLOAT * sum(moment_values(model, layer) for layer in range(model.num_layers))
        return [
            _digests(self._prepared, self._disk),
            StageForecast("checking weights", 2 * self._loading(), memory, 0, f"{self._weights():,} weights, twice"),
            StageForecast("calibrating", calibrating, memory, journal, f"{calibration_tokens:,} tokens"),
            StageForecast(
                f"quantizing with {self._prepared.request.options.quantizer}",
                experts * rates.expert,
                memory,
                journal,
                f"{experts:,} experts in {len(specs)} formats",
            ),
            StageForecast(
                "predicting what each unit costs",
                predicted * passes * self._through_layers(),
                memory,
                journal,
                f"{predicted:,} tokens, gradients and {len(specs)} formats",
            ),
            *self._divergences(memory, journal),
            self._answers(memory, journal),
            *self._comparisons(memory, journal),
            self._writing(memory, journal + self._bundle),
        ]

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _divergences(self, memory: int, disk: int) -> list[StageForecast]:
        """Return the stages that measure plans by their KL: of dense weights, of the search, of swaps."""
        answers = f"{self._kl_items():,} answers"
        return [
            StageForecast(title, count * self._kl_seconds(), memory, disk, f"{_at_most(count)}, {answers}")
            for title, count in self._divergence_counts().items()
            if count
        ]

    def _divergence_counts(self) -> dict[str, int]:
        """Return the number of plans that are measured by their KL, by the title of their stage."""
        swaps = self._prepared.request.options.swaps
        bisected = (MAX_KL * (1 if swaps == 0 else 2)) if self._target == "kl" else 1
        return {
            "measuring sensitivity of dense weights": len(dense_groups(self._model)),
            "measuring plans by their KL": CALIBRATING_KL if self._target == "loss" else bisected,
            "swapping formats at equal bytes": SWAPS + 1 if swaps is None else swaps and swaps + 1,
        }

    def _comparisons(self, memory: int, disk: int) -> list[StageForecast]:
        """Return the affordable comparisons: every uniform format, and EdgeMoE's search twice.

        Each of these searches first measures a list of all experts.
        """
        prepared, is_loss = self._prepared, self._target == "loss"
        formats = [spec for spec in self._inputs.specs if spec.bitwidth < 16]
        per_row = QuantSpec(EDGEMOE_BITWIDTHS[0])
        shapes = {self._model.unit_shape(unit.layer, unit.projection) for unit in self._model.unit_keys()}
        asked = prepared.request.options.comparisons
        if asked is False or not formats or not all(per_row.fits(c) for _, c in shapes):
            return []
        validation = [len(split.validation.items) for split in prepared.splits]
        counts = ItemCounts.of(self._kl_items(), validation[0], sum(validation), is_loss)
        needs = baseline_items(self._model, len(formats), counts)
        chosen = frozenset(needs) if asked else self._affordable(needs, sum(validation))
        title = "comparing with uniform formats and EdgeMoE"
        if UNIFORM not in chosen:
            return [StageForecast(title, 0.0, memory, disk, "left out: `moec compare` measures them")]
        experts, searches = len(self._model.expert_keys()), len(chosen) - 1
        searched = searches * (bisections(len(EDGEMOE_BITWIDTHS) + 1) + bisections(experts + 1))
        divergences = len(formats) + searched + searches * (1 + experts) * EXACT_ITEMS / max(self._kl_items(), 1)
        seconds, text = divergences * self._kl_seconds(), f"{len(formats)} formats"
        text += f", {experts:,} experts {'twice' if searches == 2 else 'once'}" if searches else ""
        if is_loss:
            answered = bisections(len(formats)) + searched
            seconds += answered * self._validation.read * self._through_layers()
            text += f", {_at_most(answered)} on all validation items"
        if searches < 2:
            text += "; `moec compare` measures the others"
        return [StageForecast(title, seconds, memory, disk, text)]

    def _affordable(self, needs: dict[str, int], validation: int) -> frozenset[str]:
        """Return the baselines that the compile will measure if its search makes all permitted measurements."""
        divergences = sum(self._divergence_counts().values())
        searched = divergences * self._kl_items() + ((1 + MAX_GENERATED) * validation if self._target == "loss" else 0)
        return affordable(needs, searched, self._validation.answered / max(validation, 1) * active_weights(self._model))

    def _kl_items(self) -> int:
        return min(KL_ITEMS, sum(len(split.validation.items) for split in self._prepared.splits))

    def _kl_seconds(self) -> float:
        """Return the seconds of one plan's pass over the answers for its KL."""
        items = max(sum(len(split.validation.items) for split in self._prepared.splits), 1)
        return self._validation.answered * self._kl_items() / items * self._through_layers()

    def _answers(self, memory: int, disk: int, reading_seconds: float = 0.0) -> StageForecast:
        """Return the stage of generated answers for a loss, and of the certificate if the model is in memory.

        The checkpoint decodes its answers. Tried plans verify these answers as drafts, and mostly agree with them.
        """
        items = sum(len(split.validation.items) for split in self._prepared.splits)
        last = sum(len(split.test.items) for split in self._prepared.splits)
        is_loss = self._target == "loss"
        tried = f"{_at_most(MAX_GENERATED)} on {items:,} items; " if is_loss else ""
        read, decoded = 2 * self._test.read, self._test.decoded
        if is_loss:
            read += (1 + MAX_GENERATED) * self._validation.read
            decoded += self._validation.decoded
        seconds = read * self._through_layers() + decoded * self._rates.decoded_token * sum(self._scales())
        text = f"{tried}checkpoint and bundle on {last:,} items, answers as long as the data's"
        return StageForecast("measuring the tasks", seconds + reading_seconds, memory, disk, text)

    def _streamed_seconds(self) -> float:
        """Return the seconds of reads while bundles that exceed memory answer. Each pass reads what is missing once."""
        room = planning.runtime_bytes(self._model, self._prepared.request.memory_limit_bytes)
        answers = (self._validation.read + self._test.read) / MAX_PASS_TOKENS
        answers += (self._validation.decoded + self._test.decoded) / ROWS_PER_STEP
        tried = (MAX_GENERATED * self._validation.read + self._test.read) / MAX_PASS_TOKENS
        read = answers * max(self._weights() * _HALF - room, 0) + tried * max(self._tried_bytes() - room, 0)
        return read * self._disk.digested_byte

    def _gradients(self, work: int) -> list[StageForecast]:
        """Return the gradient stage: each layer runs once without and once with gradients, its experts in every format.

        The residual streams stay on disk.
        """
        model, specs = self._model, self._inputs.specs
        if not asks_gradients(self._prepared.request.options.sensitivity, model):
            return []
        lengths = [min(len(row), TOKENS_PER_TEXT) for row in self._inputs.calibration[:TEXTS]]
        tokens, scale = min(sum(lengths), GRADIENT_TOKENS), self._through_layers()
        seconds = tokens * (2 + 2 * SKETCHES + len(specs) * self._share_of_experts()) * scale + 2 * self._loading()
        seconds += len(specs) * len(model.expert_keys()) * self._rates.restored_expert / self._threads
        disk = _FLOAT * model.hidden_size * tokens * (model.num_layers + 1 + 2 * SKETCHES)
        text = f"{tokens:,} tokens, gradients and {len(specs)} formats"
        scored = _count(self._inputs.answers.rows) + self._held_out
        memory = gradients_bytes(model, scored, specs, self._threads)
        return [StageForecast("predicting what each unit costs", seconds, memory, work + disk, text)]

    def _writing(self, memory: int, disk: int) -> StageForecast:
        seconds = _dense_weights(self._model) * self._rates.rounded_weight + self._bundle * self._disk.written_byte
        return StageForecast("writing the bundle", seconds, memory, disk, f"{self._bundle:,} bytes at most")

    def _sweep_seconds(self) -> float:
        rates, total = self._rates, 0.0
        others, probe = _count(self._inputs.answers.rows) + self._held_out, _count(self._inputs.probe)
        for layer, scale in enumerate(self._scales()):
            variants = variant_count(self._model) * (layer + 1) / self._model.num_layers + 1
            passed = self._calibration() * rates.calibration_token + (others + variants * probe) * rates.token
            total += scale * passed + self._loaded(layer)
            total += self._model.layers[layer].experts.count * rates.expert
        return total

    def _plan_seconds(self) -> float:
        """Return the seconds of one plan: every layer with its planned experts, then logits of plan and checkpoint."""
        answers = self._inputs.answers
        restoring = len(self._model.expert_keys()) * self._rates.restored_expert
        logits = 2 * sum(answers.counts) * self._rates.logit_token
        return self._loading() + restoring + _count(answers.rows) * self._through_layers() + logits

    def _through_layers(self) -> float:
        """Return the seconds of one token through all layers."""
        return self._rates.token * sum(self._scales())

    def _scales(self) -> list[float]:
        """Return the weights that a token uses in each layer, relative to those in the measured layer."""
        active = [active_layer_weights(self._model, layer) for layer in range(self._model.num_layers)]
        return [weights / active[self._rates.layer] for weights in active]

    def _share_of_experts(self) -> float:
        """Return the share of experts in the weights that a token uses."""
        active = sum(active_layer_weights(self._model, layer) for layer in range(self._model.num_layers))
        dense = sum(prod(s) for name, s in self._model.dense_shapes().items() if name.startswith("layers."))
        return 1 - dense / active

    def _loaded(self, layer: int) -> float:
        measured = layer_weights(self._model, self._rates.layer)
        return self._rates.loaded_layer * layer_weights(self._model, layer) / measured

    def _loading(self) -> float:
        return sum(map(self._loaded, range(self._model.num_layers)))

    def _calibration(self) -> int:
        return _count(self._inputs.calibration)

    def _weights(self) -> int:
        layers = sum(layer_weights(self._model, layer) for layer in range(self._model.num_layers))
        return layers + sum(prod(s) for name, s in self._model.dense_shapes().items() if not name.startswith("layers."))

    def _work_bytes(self) -> int:
        """Return the bytes of units in every format that fits, and of the residual streams of two layers."""
        units = 0
        for unit in self._model.unit_keys():
            rows, columns = self._model.unit_shape(unit.layer, unit.projection)
            units += sum(spec.packed_bytes(rows, columns) for spec in self._inputs.specs if spec.fits(columns))
        variants = _count(self._inputs.probe) * (variant_count(self._model) + 2)
        texts = self._calibration() + _count(self._inputs.answers.rows) + self._held_out + variants
        return units + 2 * _FLOAT * self._model.hidden_size * texts

    def _tried_bytes(self) -> int:
        """Return the bytes of a plan that keeps a loss: about 4 bits per weight, which few plans exceed."""
        return self._weights() // 2

    def _bundle_bytes(self) -> int:
        """Return the bytes of the largest bundle within the target, with dense weights at 16 bits unless fixed."""
        options, value = self._prepared.request.options, self._prepared.request.options.target.value
        experts = reachable_bytes(self._model, ())[1]
        if self._target == "bits_per_weight":
            experts = round(experts * value / 16)
        elif self._target == "size":
            experts = round(value)
        low = 0 if options.low_spec is None else reachable_bytes(self._model, [options.low_spec])[0]
        return _written_bytes(self._model, experts + low, options.dense_bits or 16)


def _at_most(plans: int) -> str:
    return "1 plan" if plans == 1 else f"at most {plans} plans"


def _digests(prepared: Prepared, disk: DiskRates) -> StageForecast:
    """Return the stage that hashes the checkpoint for the journal."""
    root = prepared.checkpoint.root
    size = sum((root / name).stat().st_size for name in prepared.checkpoint.weight_files())
    seconds = size * disk.digested_byte / min(DIGESTS_AT_ONCE, len(prepared.checkpoint.weight_files()))
    return StageForecast("hashing the checkpoint", seconds, PROCESS_BYTES, 0, f"{size:,} bytes")


def _count(rows: Iterable[Sequence[int]]) -> int:
    return sum(map(len, rows))


def _written_bytes(model: ModelSpec, experts: int, dense_bits: int) -> int:
    """Return the maximum bytes of a bundle's weights: packed experts, dense weights, scales and padding."""
    scales = 1 if dense_bits < 16 else 0  # bits per weight in groups of 32 with minima; norms keep 16 bits
    dense = sum(prod(s) * (16 if len(s) == 1 else dense_bits + scales) // 8 for s in model.dense_shapes().values())
    return experts + len(model.expert_keys()) * EXPERT_ALIGNMENT_BYTES + dense


def _dense_weights(model: ModelSpec) -> int:
    return sum(prod(shape) for shape in model.dense_shapes().values())


def _rounding_bytes(model: ModelSpec) -> int:
    """Return the peak memory of threads that each round an expert."""
    layers = ((at, model.layers[at].experts) for at in model.expert_layers)
    largest = max(sum(prod(model.unit_shape(at, p)) for p in experts.projections) for at, experts in layers)
    return PROCESS_BYTES + 2 * torch.get_num_threads() * _FLOAT * largest
