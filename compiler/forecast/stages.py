"""Stages of a compile: the number of pieces in each, times the measured seconds of a piece.

Titles are those of the progress bars where a stage has a bar. Numbers that vary are given at their maximum: measured
plans and bytes on disk. The length of generated answers is unknown beforehand. It is assumed to be that of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod

import torch

from moec.manifests.model import ModelSpec
from moec.manifests.quant import EXPERT_ALIGNMENT_BYTES, QuantSpec
from moec.manifests.runtime_limits import MAX_PASS_TOKENS
from moec.profiles.weight_counts import active_layer_weights, active_weights, all_weights, layer_weights

from ..checkpoint.checkpoint import DIGESTS_AT_ONCE
from ..effort import QUICK_ITEMS
from ..linear_maps import can_learn, learned_weights
from ..preflight.preflight import reachable_bytes
from ..preflight.prepared import MemoryNeed, Prepared, may_compare, measures_tasks
from ..request.options import UNIFORM_DENSE_BITS
from ..request.uniform import requested_plan
from ..search.bisect import MAX_KL
from ..search.comparison_budget import (
    EDGEMOE_BITWIDTHS,
    UNIFORM,
    ItemCounts,
    affordable,
    baseline_items,
    bisections,
)
from ..search.loss_search import MAX_GENERATED, USUAL_GENERATED, USUAL_KL
from ..search.swaps import SWAPS
from ..sensitivity.exact import EXACT_ITEMS
from ..sensitivity.fisher import asks_gradients
from ..stages.encode_texts import CompileTexts
from ..walker.memory import COMPILE_PROCESS_BYTES, gradients_bytes, resident_bytes, sweep_bytes, variant_count
from ..walker.texts import SKETCHES
from .answers import answer_slots, answering_bytes, count_answers
from .rates import DiskRates, ExpertRates, LayerRates

CALIBRATING, PREDICTING = "calibrating and quantizing", "predicting what each unit costs"
ANSWERING = "measuring the tasks"
_FLOAT = 4
_HALF = 2
_USUAL_SHARE = 0.7
"""Share of the held-out items that a certificate with early looks usually takes."""


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
    model, options = prepared.lowering.model, prepared.options
    plan, experts = requested_plan(options, prepared.lowering), len(model.expert_keys())
    dense = _dense_weights(model)
    written = _written_bytes(model, plan.expert_packed_bytes, options.dense_bits or UNIFORM_DENSE_BITS)
    seconds = experts * rates.expert + dense * rates.rounded_weight + written * disk.written_byte
    memory, work = _rounding_bytes(model), f"{experts:,} experts, {written:,} bytes"
    return [_digests(prepared, disk), StageForecast("writing the bundle", seconds, memory, written, work)]


class SearchForecast:
    """The stages of a compile with a search.

    texts: the texts of the compile.
    disk, rates: seconds of the pieces of work.
    disk_bytes: most of what the disk holds when it is written.
    """

    def __init__(self, prepared: Prepared, texts: CompileTexts, disk: DiskRates, rates: LayerRates) -> None:
        self._prepared, self._texts, self._disk, self._rates = prepared, texts, disk, rates
        self._model, self._target = prepared.lowering.model, prepared.options.target.kind
        self._threads, self._specs = torch.get_num_threads(), formats_below_16_bits(prepared.stored_specs)
        self._holds_model = prepared.kept_layers.holds_model
        self._held_out = sum(answers.texts.num_tokens for answers in texts.held_out.values())
        self._bundle = self._bundle_bytes()
        self.disk_bytes = self._work_bytes() + self._bundle
        self._validation, self._test = count_answers(prepared)

    def stages(self) -> list[StageForecast]:
        """Return the stages, in order."""
        model, specs = self._model, self._specs
        work, calibration = self._work_bytes(), self._texts.calibration.num_tokens
        # For tasks, the disk also holds bundles of the checkpoint and of the tried plan.
        tried = (
            all_weights(self._model) * _HALF + self._bundle
            if measures_tasks(self._prepared.options, self._holds_model)
            else 0
        )
        resident = resident_bytes(model, self._prepared.kept_layers.count)
        need = MemoryNeed(model, self._prepared.options, specs, self._threads, len(self._prepared.splits))
        memory = need.bytes_with(self._prepared.kept_layers.texts) + resident
        tokens, probe = calibration + self._texts.scored_tokens, self._texts.probe.num_tokens
        passes = sweep_bytes(model, tokens, probe, specs, self._threads) + resident
        return [
            _digests(self._prepared, self._disk),
            self._calibrating(passes, work),
            *self._gradients(work, resident),
            *self._divergences(passes, work),
            *self._comparisons(passes, work),
            self._writing(passes, work + self._bundle),
            StageForecast(
                f"KL on {', '.join(self._texts.held_out)}",
                self._held_out * (self._rates.tried_token * sum(self._scales()) + self._rates.logit_token),
                memory,
                work + self._bundle,
                f"{self._held_out:,} held-out tokens",
            ),
            *([self._answers(memory, work + tried)] if tried else []),
        ]

    def calibrated_stages(self) -> list[StageForecast]:
        """Return the stages of `--uniform` with data: no plan is measured."""
        resident = resident_bytes(self._model, self._prepared.kept_layers.count)
        work, probe = self._work_bytes(), self._texts.probe.num_tokens
        tokens = self._texts.calibration.num_tokens
        memory = sweep_bytes(self._model, tokens, probe, self._specs, self._threads) + resident
        return [
            _digests(self._prepared, self._disk),
            self._calibrating(memory, work),
            self._writing(memory, work + self._bundle),
        ]

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _calibrating(self, memory: int, work: int) -> StageForecast:
        calibration, experts = self._texts.calibration.num_tokens, len(self._model.expert_keys())
        return StageForecast(
            CALIBRATING,
            self._sweep_seconds() + work * self._disk.written_byte,
            memory,
            work,
            f"{calibration:,} tokens, {experts:,} experts in {len(self._specs)} formats",
        )

    def _divergences(self, memory: int, disk: int) -> list[StageForecast]:
        """Return the stages that measure plans by their KL: of the search, and of swaps."""
        text = f"{self._texts.validation.texts.num_tokens:,} tokens each"
        return [
            StageForecast(title, count * self._plan_seconds(), memory, disk, f"{_at_most(count)}, {text}")
            for title, count in self._divergence_counts().items()
            if count
        ]

    def _divergence_counts(self) -> dict[str, int]:
        """Return the number of plans that are measured by their KL, by the title of their stage."""
        swaps = self._prepared.options.swaps
        if swaps is None:
            swaps = SWAPS if self._prepared.kept_layers.has_cheap_plans else 0
        usual = MAX_KL if self._prepared.options.effort == "quick" else USUAL_KL
        plans = {"loss": usual, "kl": MAX_KL * (2 if swaps else 1)}.get(self._target, 1)
        return {"measuring plans by their KL": plans, "swapping formats at equal bytes": swaps + 1 if swaps else 0}

    def _comparisons(self, memory: int, disk: int) -> list[StageForecast]:
        """Return the affordable comparisons: every uniform format, and EdgeMoE's search twice.

        Each of these searches first measures a list of all experts.
        """
        prepared, is_loss = self._prepared, self._target == "loss"
        formats = formats_below_16_bits(prepared.specs)
        per_row = QuantSpec(EDGEMOE_BITWIDTHS[0])
        shapes = {self._model.unit_shape(unit.layer, unit.projection) for unit in self._model.unit_keys()}
        is_asked = prepared.options.comparisons
        is_possible = bool(formats) and all(per_row.fits(columns) for _, columns in shapes)
        if not is_possible or not may_compare(prepared.options, prepared.kept_layers):
            return []
        validation = [len(split.validation.items) for split in prepared.splits]
        counts = ItemCounts.of(self._kl_items(), validation[0], sum(validation), is_loss)
        needs = baseline_items(self._model, len(formats), counts)
        chosen = frozenset(needs) if is_asked else self._affordable(needs, sum(validation))
        title = "comparing with uniform formats and EdgeMoE"
        if UNIFORM not in chosen:
            return [StageForecast(title, 0.0, memory, disk, "left out: `moec compare` measures them")]
        experts, searches = len(self._model.expert_keys()), len(chosen) - 1
        searched = searches * (bisections(len(EDGEMOE_BITWIDTHS) + 1) + bisections(experts + 1))
        divergences = len(formats) + searched + searches * (1 + experts) * EXACT_ITEMS / max(self._kl_items(), 1)
        seconds, text = divergences * self._plan_seconds(), f"{len(formats)} formats"
        text += f", {experts:,} experts {'twice' if searches == 2 else 'once'}" if searches else ""
        if is_loss:
            answered = bisections(len(formats)) + searched
            seconds += answered * self._validation.read * self._rates.tried_token * sum(self._scales())
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
        return len(self._texts.validation.counts)

    def _answers(self, memory: int, disk: int) -> StageForecast:
        """Return the stage of generated answers: for a loss on validation items, and for the certificate.

        The checkpoint decodes its answers. Tried plans verify these answers as drafts, and mostly agree with them. The
        numbers of plans and of held-out items are usual ones.
        """
        items = sum(len(split.validation.items) for split in self._prepared.splits)
        rates, is_quick = self._rates, self._prepared.options.effort == "quick"
        is_loss, is_early = self._target == "loss" and not is_quick, not self._prepared.kept_layers.has_cheap_plans
        held_out = [len(split.test.items) for split in self._prepared.splits]
        certified = sum(min(count, QUICK_ITEMS) if is_quick else count for count in held_out)
        share = certified / max(sum(held_out), 1) * (_USUAL_SHARE if is_loss and is_early else 1.0)
        work = f"about {USUAL_GENERATED} plans on {items:,} items; " if is_loss else ""
        by_plans, by_checkpoint = share * self._test.read, self._test.scaled(share)
        if is_loss:
            by_plans += USUAL_GENERATED * self._validation.read
            by_checkpoint += self._validation
        seconds = (by_checkpoint.read - by_checkpoint.decoded) * rates.read_token
        seconds += by_checkpoint.decoded * rates.decoded_token + by_plans * rates.tried_token
        about = "about " if is_loss and is_early else ""
        work += f"checkpoint and bundle on {about}{share * sum(held_out):,.0f} items, answers as long as the data's"
        seconds = seconds * sum(self._scales()) + self._reading_seconds()
        return StageForecast(ANSWERING, seconds, max(memory, answering_bytes(self._prepared)), disk, work)

    def _reading_seconds(self) -> float:
        """Return the seconds of reads while bundles that exceed memory answer. Each pass reads what is missing once."""
        resident = resident_bytes(self._model, self._model.num_layers) if self._prepared.kept_layers.holds_model else 0
        room = self._prepared.runtime_bytes - resident
        answers = (self._validation.read + self._test.read) / MAX_PASS_TOKENS
        answers += (self._validation.decoded + self._test.decoded) / answer_slots(self._prepared)
        tried = (USUAL_GENERATED * self._validation.read + self._test.read) / MAX_PASS_TOKENS
        read = answers * max(all_weights(self._model) * _HALF - room, 0) + tried * max(self._tried_bytes() - room, 0)
        return read * self._disk.digested_byte

    def _gradients(self, work: int, resident: int) -> list[StageForecast]:
        """Return the gradient stage: each layer runs once without and once with gradients, its experts in every format.

        The residual streams stay on disk.
        """
        model, specs = self._model, self._specs
        if not asks_gradients(self._prepared.options.sensitivity, model):
            return []
        tokens, scale = self._texts.gradients.texts.num_tokens, self._through_layers()
        seconds = tokens * (2 + 2 * SKETCHES + len(specs) * self._share_of_experts()) * scale + 2 * self._loading()
        seconds += len(specs) * len(model.expert_keys()) * self._rates.restored_expert / self._threads
        disk = _FLOAT * model.hidden_size * tokens * (model.num_layers + 1 + 2 * SKETCHES)
        text = f"{tokens:,} tokens, gradients and {len(specs)} formats"
        memory = gradients_bytes(model, tokens, self._texts.scored_tokens, specs, self._threads) + resident
        return [StageForecast(PREDICTING, seconds, memory, work + disk, text)]

    def _writing(self, memory: int, disk: int) -> StageForecast:
        seconds = _dense_weights(self._model) * self._rates.rounded_weight + self._bundle * self._disk.written_byte
        return StageForecast("writing the bundle", seconds, memory, disk, f"{self._bundle:,} bytes at most")

    def _sweep_seconds(self) -> float:
        rates, total = self._rates, 0.0
        others, probe = self._texts.scored_tokens, self._texts.probe.num_tokens
        calibration = self._texts.calibration.num_tokens
        for layer, scale in enumerate(self._scales()):
            variants = variant_count(self._model) * (layer + 1) / self._model.num_layers + 1
            passed = calibration * rates.calibration_token + (others + variants * probe) * rates.token
            total += scale * passed + self._loaded(layer)
            total += self._model.layers[layer].experts.count * rates.expert
        return total

    def _plan_seconds(self) -> float:
        """Return the seconds of one plan: every layer with its planned experts, then logits of plan and checkpoint."""
        answers = self._texts.validation
        restoring = len(self._model.expert_keys()) * self._rates.restored_expert
        logits = 2 * sum(answers.counts) * self._rates.logit_token
        return self._loading() + restoring + answers.texts.num_tokens * self._through_layers() + logits

    def _through_layers(self) -> float:
        """Return the seconds of one token through all layers."""
        return self._rates.token * sum(self._scales())

    def _scales(self) -> list[float]:
        return layer_scales(self._model, self._rates.layer)

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

    def _work_bytes(self) -> int:
        """Return the bytes of units in every format that fits, and of the residual streams of two layers."""
        units = 0
        for unit in self._model.unit_keys():
            rows, columns = self._model.unit_shape(unit.layer, unit.projection)
            units += sum(spec.packed_bytes(rows, columns) for spec in self._specs if spec.fits(columns))
        variants = self._texts.probe.num_tokens * (variant_count(self._model) + 2)
        texts = self._texts.calibration.num_tokens + self._texts.scored_tokens + variants
        return units + 2 * _FLOAT * self._model.hidden_size * texts

    def _tried_bytes(self) -> int:
        """Return the bytes of a plan that keeps a loss: about 4 bits per weight, which few plans exceed."""
        return all_weights(self._model) // 2

    @property
    def answering_bytes(self) -> int:
        """Bytes of the bundle that answers: of a plan that keeps a loss or a KL, or of the largest one."""
        return min(self._bundle, self._tried_bytes()) if self._target in ("loss", "kl") else self._bundle

    def _bundle_bytes(self) -> int:
        """Return the bytes of the largest bundle within the target, with dense weights at 16 bits unless fixed."""
        options, value = self._prepared.options, self._prepared.options.target.value
        experts = reachable_bytes(self._model, ())[1]
        if self._target == "bits_per_weight":
            experts = round(experts * value / 16)
        elif self._target == "size":
            experts = round(value)
        elif self._target == "uniform":
            experts = requested_plan(options, self._prepared.lowering).expert_packed_bytes
        low = 0 if options.low_spec is None else reachable_bytes(self._model, [options.low_spec])[0]
        dense_bits = UNIFORM_DENSE_BITS if self._target == "uniform" else 16
        searched = self._target != "uniform" and can_learn(self._model)
        learned = _HALF * sum(learned_weights(self._model)) if searched else 0  # learned routers
        return learned + _written_bytes(self._model, experts + low, options.dense_bits or dense_bits)


def layer_scales(model: ModelSpec, measured: int) -> list[float]:
    """Return the weights that a token uses in each layer, relative to those in the measured layer."""
    active = [active_layer_weights(model, layer) for layer in range(model.num_layers)]
    return [weights / active[measured] for weights in active]


def _at_most(plans: int) -> str:
    return "1 plan" if plans == 1 else f"at most {plans} plans"


def _digests(prepared: Prepared, disk: DiskRates) -> StageForecast:
    """Return the stage that hashes the checkpoint for the journal."""
    root = prepared.checkpoint.root
    size = sum((root / name).stat().st_size for name in prepared.checkpoint.weight_files())
    seconds = size * disk.digested_byte / min(DIGESTS_AT_ONCE, len(prepared.checkpoint.weight_files()))
    return StageForecast("hashing the checkpoint", seconds, COMPILE_PROCESS_BYTES, 0, f"{size:,} bytes")


def formats_below_16_bits(specs: Sequence[QuantSpec]) -> list[QuantSpec]:
    """Return the formats in which units are quantized."""
    return [spec for spec in specs if spec.bitwidth < 16]


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
    return COMPILE_PROCESS_BYTES + 2 * torch.get_num_threads() * _FLOAT * largest
