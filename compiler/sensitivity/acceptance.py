"""The rule by which a search accepts a measured loss, and how many items make a loss known well enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from moec.evaluation.results import EvaluationResult
from moec.evaluation.statistics import ERROR, DistributionSummary, LossEstimate, perplexity_loss, relative_loss
from moec.evaluation.tasks import Task

from ..request.targets import Target


@dataclass(frozen=True, slots=True)
class Level:
    """One place in the list of plans that a certificate tests, until it supports one.

    quantile: normal quantile of the probability with which the search expects the plan there to be supported.
    share: of the error of the whole list. The shares of a list sum to 1, so the error of the list is at most 5 %.
    """

    quantile: float
    share: float

    @property
    def bound_quantile(self) -> float:
        """Standard errors between a loss and the bound of its certificate."""
        return NormalDist().inv_cdf(1 - ERROR * self.share)


LEVELS = (Level(0.5, 0.6), Level(1.0, 0.15), Level(1.6, 0.1), Level(2.5, 0.1), Level(4.0, 0.05))
"""The list of a target: expected to be supported in 69 %, 84 %, 95 %, 99 % and nearly all cases."""
PRECISION = 0.25
"""Standard error of a loss, as a share of the target, that needs no more items."""
CLEAR_STANDARD_ERRORS = 3.0
"""Distance of a loss from the decision, in standard errors, at which more items are not needed."""
TRIAL_RESAMPLES = 2000
"""Enough for a standard error. The certificate uses five times as many."""


def margin(standard_error: float, items: int, certification_items: int, level: Level = LEVELS[0]) -> float:
    """Return the distance that a loss with this standard error on so many items must keep from its target.

    It is the expected width of the certificate's one-sided bound, plus a margin for the difference of two losses. So
    the certificate of a plan at the limit is supported with the probability of the level.
    Source: docs/experiments/2026-11.md, 30: A finer list of plans.
    """
    at_certification = standard_error * math.sqrt(items / max(certification_items, 1))
    return level.bound_quantile * at_certification + level.quantile * math.hypot(standard_error, at_certification)


def kl_bound(summary: DistributionSummary, texts: Sequence[tuple[int, int]], level: Level = LEVELS[0]) -> float:
    """Return the bound of a mean KL that the search compares with the target. Of several tasks it is the largest one.

    A single text has no spread, so the bound is its mean.
    texts: for each task the number of texts in this measurement, and of held-out texts.
    """
    means = summary.by_task or ((summary.mean, summary.standard_error),)
    bounds = [
        mean + (margin(error, measured, held_out, level) if math.isfinite(error) else 0.0)
        for (mean, error), (measured, held_out) in zip(means, texts, strict=True)
    ]
    return max(bounds)


def may_be_kept(estimate: LossEstimate, target: float) -> bool:
    """Return whether a loss is at least one standard error below its target. Every accepted loss is."""
    return estimate.loss + estimate.standard_error <= target


def upper_bound(estimate: LossEstimate, certification_items: int) -> float:
    """Return the bound of a loss that the search compares with the target: the loss and its margin."""
    return estimate.loss + margin(estimate.standard_error, estimate.n, certification_items)


def keeps(estimate: LossEstimate, target: float, certification_items: int) -> bool:
    """Return whether the search accepts a loss."""
    return upper_bound(estimate, certification_items) <= target and may_be_kept(estimate, target)


def is_clear(estimate: LossEstimate, target: float, certification_items: int) -> bool:
    """Return whether more items would hardly change the decision."""
    distance = abs(upper_bound(estimate, certification_items) - target)
    return distance > CLEAR_STANDARD_ERRORS * estimate.standard_error > 0


def items_for_precision(estimate: LossEstimate, target: float) -> int:
    """Return about how many items make the standard error PRECISION times the target, if all else stays the same.

    0 if the standard error is not known.
    """
    if not math.isfinite(estimate.standard_error):
        return 0
    return math.ceil(estimate.n * (estimate.standard_error / (PRECISION * target)) ** 2)


def changed_share(task: Task, baseline: float, target: Target, certification_items: int) -> float | None:
    """Return the share of changed scores up to which held-out items support a plan that loses half of the target.

    The variance of a paired difference of scores of 0 and 1 is at most the share of items where they differ. The bound
    counts one item more.
    baseline: score of the checkpoint.
    Returns None for tasks with other scores, and for a share above 1.
    """
    if task.is_perplexity or task.score_range != 1.0 or not task.higher_is_better:
        return None
    width = target.value / 2 * baseline - 1 / certification_items
    share = certification_items * (max(width, 0.0) / LEVELS[0].bound_quantile) ** 2
    return share if share < 1 else None


def loss_so_far(task: Task, baseline: EvaluationResult, parts: Sequence[EvaluationResult]) -> LossEstimate:
    """Return the relative loss on the items measured so far, paired with the first items of the baseline."""
    scores = np.concatenate([result.scores for result in parts])
    count = len(scores)
    if task.is_perplexity:
        nll, tokens = (np.concatenate([getattr(result, name) for result in parts]) for name in ("nll", "tokens"))
        return perplexity_loss(baseline.nll[:count], baseline.tokens[:count], nll, tokens, TRIAL_RESAMPLES)
    return relative_loss(
        baseline.scores[:count], scores, task.higher_is_better, task.score_range, resamples=TRIAL_RESAMPLES
    )
