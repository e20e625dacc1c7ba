"""Difference between the next-token distributions of two models, token by token; the bound and verdict of its mean.

Shapes: A answer tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .statistics import MIN_ITEMS, ONE_SIDED_95, DistributionSummary, distribution_summary

_WIDE_AT_ONCE = 1 << 21  # float64 probabilities in memory at once, 16 MiB


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Compute log softmax of each row, in float64. Returns float32."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.float32)


def divergence(log_p: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return KL(reference || logits) per row in nats, and whether the top-1 tokens agree.

    log_p: log probabilities of the reference, [A, V].
    logits: [A, V].
    """
    kl, agrees = np.empty(len(log_p)), np.empty(len(log_p), bool)
    rows = max(1, _WIDE_AT_ONCE // max(log_p.shape[1], 1))
    for start in range(0, len(log_p), rows):
        rows_at_once = slice(start, start + rows)
        log_q = log_softmax(logits[rows_at_once])
        kl[rows_at_once] = np.sum(
            np.exp(log_p[rows_at_once].astype(np.float64)) * (log_p[rows_at_once] - log_q), axis=1
        )
        agrees[rows_at_once] = np.argmax(log_p[rows_at_once], axis=1) == np.argmax(log_q, axis=1)
    return np.maximum(kl, 0.0), agrees


def summarise_divergence(log_p: Sequence[np.ndarray], logits: Sequence[np.ndarray]) -> DistributionSummary:
    """Summarise KL and agreement over the answer tokens of several items."""
    parts = [divergence(r, q) for r, q in zip(log_p, logits, strict=True)]
    items = np.concatenate([np.full(len(kl), i) for i, (kl, _) in enumerate(parts)])
    return distribution_summary(np.concatenate([kl for kl, _ in parts]), np.concatenate([s for _, s in parts]), items)


def divergence_bound(summary: DistributionSummary) -> float:
    """Return the upper one-sided 95 % bound of a mean KL, nats per token. Of several tasks it is the largest bound.

    With a single text, which has no spread, it is the mean itself.
    """
    means = summary.by_task or ((summary.mean, summary.standard_error),)
    return max(mean + (ONE_SIDED_95 * error if math.isfinite(error) else 0.0) for mean, error in means)


def judge_divergence(summary: DistributionSummary, target: float, items: int) -> str:
    """Judge a mean KL in nats per token against its target, one-sided at 95 %: supported, met, missed or refuted.

    With fewer than MIN_ITEMS texts their spread proves nothing. The verdict is then met or missed.
    items: number of texts.
    """
    width = ONE_SIDED_95 * summary.standard_error if items >= MIN_ITEMS else math.inf
    if summary.mean <= target:
        return "supported" if summary.mean + width <= target else "met"
    return "refuted" if summary.mean - width > target else "missed"
