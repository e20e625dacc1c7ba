"""The example after a sweep and gradients, and the KL of its plans. The benchmarks of the search use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moec.compiler.quantization.swept_store import SweptStore
from moec.compiler.request.plan import CompilePlan
from moec.compiler.search.space import SearchSpace
from moec.compiler.sensitivity.answer_walk import AnswerWalk, planned_weights
from moec.compiler.sensitivity.fisher import TEXTS, predictions
from moec.compiler.sensitivity.gradients import LayerGradients
from moec.compiler.sensitivity.sensitivity import SensitivityTable, with_gradients
from moec.compiler.stages.encode_texts import CompileTexts
from moec.compiler.stages.sweep import Sweep
from moec.compiler.walker.memory import LARGE_TEXTS
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.manifests.quant import QuantSpec

from ..example import SEED, Example, silent
from .measured_model import plan_of_size

CALIBRATION_ITEMS = 500


@dataclass(frozen=True)
class MeasuredExample:
    """The example with units in several formats and the cost of each.

    store: units in every format, quantized by GPTQ.
    gains: prices of units from their errors.
    prices: prices of units from gradients. Dense weights cost nothing in both.
    popularity: uint32 [L, E], tokens of each expert.
    walk: measures validation answers.
    """

    example: Example
    store: SweptStore
    gains: SensitivityTable
    prices: SensitivityTable
    popularity: np.ndarray
    walk: AnswerWalk

    def kl(self, plan: CompilePlan) -> float:
        """Return the mean KL of a plan to the unquantized model, nats per answer token."""
        return float(self.walk.measure(planned_weights(plan, self.store)).kl.mean())


def plan_within(space: SearchSpace, bits_per_weight: float) -> CompilePlan | None:
    """Return the plan of least predicted loss within the bytes of an average bitwidth, or None if no plan fits."""
    return plan_of_size(space, bits_per_weight * space.plain.expert_weights / 8)


def measured_example(
    example: Example, specs: Sequence[QuantSpec], kl_items: int, work: Path, calibration_items: int = CALIBRATION_ITEMS
) -> MeasuredExample:
    """Quantize all units and price them, as in a compile.

    specs: formats below 16 bits. Pruning may be among them: experts may then be left out.
    kl_items: number of validation answers.
    work: folder of the quantized units.
    """
    train = example.splits.train.limit(calibration_items, SEED).items
    calibration, answers = example.texts(train), example.answers(example.splits.validation.items[:kl_items])
    texts = CompileTexts(
        calibration, calibration.first(LARGE_TEXTS.probe), example.answers(train[:TEXTS]), answers, held_out={}
    )
    journal, threads = Journal(work, "bench", Disk()), torch.get_num_threads()
    store = SweptStore(example.lowering, "gptq", [spec for spec in specs if not spec.is_pruned], journal)
    swept = Sweep(example.slot, store, journal, example.plain.dense, SEED).run(texts, threads, silent)
    if swept.statistics is None:
        raise RuntimeError("a sweep without texts has no popularity")
    gradients = LayerGradients(example.slot, store, texts.gradients, specs, journal).run(SEED, threads, silent)
    predicted = predictions(gradients, example.model, specs)
    prices = with_gradients(swept.sensitivity, store, store.specs, predicted)
    walk = AnswerWalk(lambda: example.slot, answers, threads, silent, swept.answers)
    return MeasuredExample(example, store, swept.sensitivity, prices, swept.statistics.popularity, walk)
