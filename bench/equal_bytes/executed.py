"""KL of plans as the runtime executes them: activations rounded to 8 bits in addition to the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from moec.compiler.bundle.certificates import certify_divergence
from moec.compiler.bundle.plan_bundles import UNQUANTIZED, PlanBundles
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.request.options import Talk
from moec.compiler.request.plan import CompilePlan
from moec.compiler.request.ports import BundleEngine
from moec.evaluation.divergence import log_softmax
from moec.evaluation.statistics import DistributionSummary
from moec.evaluation.text_pairs import TokenPair


@dataclass(frozen=True)
class ExecutedPlans:
    """Runs plans in the runtime, next to the checkpoint's own weights at 16 bits in a second one.

    pairs: prompts and answers.
    """

    bundles: PlanBundles
    reference: BundleEngine
    pairs: Sequence[TokenPair]

    def kl(self, plan: CompilePlan, store: UnitStore) -> DistributionSummary:
        """Return the KL of a plan to the checkpoint over the tokens of the answers."""

        def own(first: int, last: int) -> list[np.ndarray]:
            return [log_softmax(logits) for logits in self.reference.forced_logits(self.pairs[first:last])]

        vocabulary = self.bundles.lowering.model.vocab_size
        with self.bundles.opened(plan, store) as engine:
            return certify_divergence("answers", self.pairs, own, vocabulary, engine, Talk()).divergence


@contextmanager
def open_executed(bundles: PlanBundles, plain: CompilePlan, pairs: Sequence[TokenPair]) -> Iterator[ExecutedPlans]:
    """Open the checkpoint in the runtime.

    plain: the plan at 16 bits.
    """
    with bundles.opened(plain, None, UNQUANTIZED) as reference:
        yield ExecutedPlans(bundles, reference, pairs)
