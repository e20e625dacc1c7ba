"""KL of plans as the runtime executes them: activations rounded to 8 bits in addition to the weights."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np

from moec.cli.measuring.text_engines import BundleEngine
from moec.compiler.bundle.certify import certify_divergence
from moec.compiler.bundle.plan_bundles import UNQUANTIZED, PlanBundles
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.request.options import Talk
from moec.compiler.request.plan import CompilePlan
from moec.compiler.request.ports import LocalEngine
from moec.compiler.walker.texts import AnswerTexts
from moec.evaluation.divergence import log_softmax
from moec.evaluation.statistics import DistributionSummary


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
        with self.bundles.opened(plan, store) as engine:
            local = cast(LocalEngine, engine)
            return certify_divergence("answers", self.answers, own, vocabulary, local, Talk()).divergence


@contextmanager
def open_executed(bundles: PlanBundles, plain: CompilePlan, answers: AnswerTexts) -> Iterator[ExecutedPlans]:
    """Open the checkpoint in the runtime.

    plain: the plan at 16 bits.
    """
    with bundles.opened(plain, None, UNQUANTIZED) as reference:
        yield ExecutedPlans(bundles, cast(BundleEngine, reference), answers)
