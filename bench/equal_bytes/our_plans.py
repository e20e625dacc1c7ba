"""Plans of moec for given bytes of the routed experts, and simpler ones. The rest of the model keeps 16 bits.

The runtime executes plans with activations rounded to 8 bits in addition to the weights.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from moec.cli.measuring.text_engines import BundleEngine
from moec.compiler.bundle.certify import certify_divergence
from moec.compiler.bundle.plan_bundles import UNQUANTIZED, PlanBundles
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.request.options import CompileOptions, Talk
from moec.compiler.request.plan import CompilePlan
from moec.compiler.request.ports import LocalEngine
from moec.compiler.request.targets import Target
from moec.compiler.request.uniform import fits_all, uniform_like
from moec.compiler.search.bisect import search
from moec.compiler.stages.planning import swaps
from moec.compiler.walker.texts import AnswerTexts
from moec.evaluation.statistics import DistributionSummary, log_softmax
from moec.manifests.errors import TargetUnreachable

from ..search.grouped_space import Grouping, grouped
from ..search.measured_model import measure_model, plan_of_size, say


class OurPlans:
    """A model that was measured once, and its plans for any number of bytes.

    model, data: folders. task: name of the task.
    work: folder of the measurements. A second call with the same inputs takes them from there.
    bits: bitwidths on offer.
    swap_count: swaps of each search; None: as many as a compile makes.
    """

    def __init__(
        self, model: str, data: str, task: str, work: Path, bits: tuple[float, ...], swap_count: int | None
    ) -> None:
        options = CompileOptions(
            Target("bits_per_weight", 4.0),
            data=data,
            tasks=(task,),
            dense_bits=16,
            bits=bits,
            comparisons=False,
            swaps=swap_count,
        )
        measured = measure_model(model, options, work)
        self.store: UnitStore = measured.measured.store
        self.bundles = measured.context.bundles
        self._space, self._specs = measured.space, measured.prepared.specs
        self._trials, self._swaps = measured.measured.trials, swaps(measured.prepared)

    @property
    def plain(self) -> CompilePlan:
        """The plan at 16 bits."""
        return self._space.plain

    def within(self, size_bytes: int) -> CompilePlan | None:
        """Return the plan of `moec compile --size` for the experts. None if none fits."""
        try:
            return search(self._space, self._trials, Target("size", size_bytes), say, self._swaps)
        except TargetUnreachable:
            return None

    def uniform(self) -> dict[str, CompilePlan]:
        """Return the plans with one format for all experts, by the name of the format."""
        plain = self._space.plain
        fitting = [spec for spec in self._specs if spec.bitwidth < 16 and fits_all(plain, spec)]
        return {str(spec): uniform_like(plain, spec) for spec in fitting}

    def grouped(self, size_bytes: int, group_of: Grouping) -> CompilePlan | None:
        """Return the best plan in which the units of a group share one format. None if none fits."""
        return plan_of_size(grouped(self._space, group_of), size_bytes)


@dataclass(frozen=True)
class ExecutedPlans:
    """Runs plans in the runtime, next to the checkpoint's own weights at 16 bits in a second one.

    answers: what is scored.
    """

    bundles: PlanBundles
    reference: BundleEngine
    answers: AnswerTexts

    def kl(self, plan: CompilePlan, store: UnitStore) -> DistributionSummary:
        """Return the KL of a plan to the checkpoint over the tokens of the answers."""
        starts = [0, *itertools.accumulate(self.answers.counts)]

        def own(start: int, end: int) -> np.ndarray:
            """Compute whole answers that contain the tokens."""
            first, last = bisect_right(starts, start) - 1, bisect_left(starts, end)
            logits = self.reference.forced_logits(self.answers.pairs[first:last])
            return np.concatenate(list(map(log_softmax, logits)))[start - starts[first] : end - starts[first]]

        vocabulary = self.bundles.lowering.model.vocab_size
        with (
            self.bundles.written(plan, store) as folder,
            self.bundles.open_runtime(folder, self.bundles.room_bytes) as engine,
        ):
            local = cast(LocalEngine, engine)
            return certify_divergence("answers", self.answers, own, vocabulary, local, Talk()).divergence


@contextmanager
def open_executed(bundles: PlanBundles, plain: CompilePlan, answers: AnswerTexts) -> Iterator[ExecutedPlans]:
    """Open the checkpoint in the runtime.

    plain: the plan at 16 bits.
    """
    with (
        bundles.written(plain, None, UNQUANTIZED) as folder,
        bundles.open_runtime(folder, bundles.room_bytes) as reference,
    ):
        yield ExecutedPlans(bundles, cast(BundleEngine, reference), answers)
