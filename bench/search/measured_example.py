"""The calibrated example model, and trials that measure KL on its validation answers. Several benchmarks use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moec.compiler.calibration.collect import calibrate
from moec.compiler.calibration.second_moments import SecondMoments
from moec.compiler.checkpoint.checkpoint import open_checkpoint
from moec.compiler.families import lower
from moec.compiler.families.lowering import Lowering
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.reference.model import ReferenceModel
from moec.compiler.request.plan import CompilePlan, plain_plan
from moec.compiler.sensitivity.fisher import TEXTS, predict_units
from moec.compiler.sensitivity.sensitivity import dense_formats
from moec.compiler.sensitivity.trials import TaskData, Trials
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.evaluation.data import SplitData, load_splits
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec

CALIBRATION_ITEMS = 500


def silent(done: int, total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class MeasuredExample:
    """The example model after calibration.

    texts: prompts and answers of the calibration; no trial measures them.
    moments: second moments of these texts; `store` quantizes against them.
    store: units in every format.
    plain: plan with everything at 16 bits.
    """

    lowering: Lowering
    reference: ReferenceModel
    splits: SplitData
    texts: Sequence[tuple[str, str]]
    moments: SecondMoments
    store: UnitStore
    plain: CompilePlan

    def trials(self, work: Path, kl_items: int) -> Trials:
        """Return trials on `kl_items` validation answers. The folder `work` keeps measurements."""
        data = (TaskData(self.splits.task, self.splits.validation, 1, ()),)
        return Trials(self.reference, self.store, data, kl_items, silent, Journal(work, "bench", Disk()))

    def fisher(self, specs: Sequence[QuantSpec], journal: Journal) -> dict[tuple[UnitKey, QuantSpec], float]:
        """Return the predicted KL of every unit in every format, computed as in a compile."""
        asked = [self.reference.encode_pairs(self.texts[:TEXTS])]
        return predict_units(self.reference, self.store, specs, asked, 0, journal, silent)

    def dense(self, bitwidth: int) -> Mapping[str, QuantSpec]:
        """Return formats that give all dense weights one bitwidth."""
        return dense_formats(self.plain, (bitwidth,), 64, self.lowering.float_type)[0]


def measured_example(
    model: str, data: str, task: str | None = None, calibration_items: int = CALIBRATION_ITEMS
) -> MeasuredExample:
    """Calibrate a model for GPTQ on the train split of a folder of splits.

    model, data: folders.
    task: None for the first task.
    """
    splits = load_splits(data, task)
    splits = replace(splits, train=splits.train.limit(calibration_items, 0))
    lowering, reference = lower(open_checkpoint(model)), ReferenceModel(model)
    texts = [(splits.task.prompt(item, ()), splits.task.answer(item)) for item in splits.train.items]
    moments = calibrate(reference, reference.encode_pairs(texts)).second_moments
    plain = plain_plan(lowering.model, lowering.spec_16bit, "gptq")
    return MeasuredExample(lowering, reference, splits, texts, moments, UnitStore(lowering, moments, "gptq"), plain)
