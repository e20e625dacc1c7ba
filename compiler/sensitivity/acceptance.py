"""The rule by which a search accepts a measured loss, and how many items make a loss known well enough."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moec.evaluation.results import EvaluationResult
from moec.evaluation.statistics import ONE_SIDED_95, LossEstimate, perplexity_loss, relative_loss
from moec.evaluation.tasks import Task

ONE_SIDED_90 = 1.2816
"""One-sided quantile of the normal distribution."""
PRECISION = 0.25
"""Standard error of a loss, as a share of the target, that needs no more items."""
CLEAR_STANDARD_ERRORS = 3.0
"""Distance of a loss from the decision, in standard errors, at which more items are not needed."""
TRIAL_RESAMPLES = 2000
"""Enough for a standard error. The certificate uses five times as many."""


def margin(estimate: LossEstimate, certification_items: int) -> float:
    """Return the distance that a loss must keep from its target.

    It is the expected width of the certificate's one-sided 95 % bound, plus a margin for the difference of two losses.
    So the certificate of a plan at the limit is supported with a probability of 90 %.
    Source: docs/experiments/2026-11.md, 25: Acceptance rules by simulation.
    """
    return margin_of(estimate.standard_error, estimate.n, certification_items)


def margin_of(standard_error: float, items: int, certification_items: int) -> float:
    """Return `margin` of a loss with this standard error on this number of items."""
    at_certification = standard_error * math.sqrt(items / max(certification_items, 1))
    return ONE_SIDED_95 * at_certification + ONE_SIDED_90 * math.hypot(standard_error, at_certification)


def may_be_kept(estimate: LossEstimate, target: float) -> bool:
    """Return whether a loss is at least one standard error below its target. Every accepted loss is."""
    return estimate.loss + estimate.standard_error <= target


def upper_bound(estimate: LossEstimate, certification_items: int) -> float:
    """Return the bound of a loss that the search compares with the target: the loss and its margin."""
    return estimate.loss + margin(estimate, certification_items)


def keeps(estimate: LossEstimate, target: float, certification_items: int) -> bool:
    """Return whether the search accepts a loss. Acceptance implies loss + one standard error <= target."""
    return upper_bound(estimate, certification_items) <= target


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
