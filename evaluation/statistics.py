"""Paired bootstrap, loss estimates, verdicts, and divergence per token: its mean, bound and verdict.

Resampling draws items with a fixed seed: the same scores in the same order give the same bits.
Numbers that cannot be determined are infinite or nan here and null in JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moec.manifests.errors import ExecutionError, OptionError

Array = NDArray[np.float64]

RESAMPLES = 10_000
SEED = 0x6D6F6563
TAIL_DRAWS = 20
"""Least number of draws beyond a bound."""
MIN_ITEMS = 30
"""Least number of items for which a percentile interval counts as evidence."""
ERROR = 0.05
"""One-sided error probability of every bound, unless another is given."""
ONE_SIDED_95 = 1.645
"""Standard errors of a one-sided 95 % bound of a mean: the normal quantile of 1 - ERROR."""
_CHUNK_ENTRIES = 1 << 18  # item counts per chunk: 2 MB, fits the second-level cache
_WIDE_AT_ONCE = 1 << 21  # float64 probabilities in memory at once, 16 MiB


@dataclass(frozen=True, slots=True)
class LossEstimate:
    """The relative loss of one model against a baseline, on the same n items. All losses are relative (0.02 = 2 %).

    interval95: two-sided percentile interval.
    lower95, upper95: one-sided bounds, which allow for one item more.
    largest_item_loss: most that one item can add to n times the loss; None without a limit.
    error: one-sided error probability of a verdict.
    bounds: one-sided bounds at that error; None if it is 5 %.
    """

    baseline: float
    value: float
    loss: float
    interval95: tuple[float, float]
    lower95: float
    upper95: float
    standard_error: float
    n: int
    largest_item_loss: float | None
    error: float = ERROR
    bounds: tuple[float, float] | None = None

    @property
    def deciding(self) -> tuple[float, float]:
        """Lower and upper one-sided bound that decide a verdict."""
        return (self.lower95, self.upper95) if self.bounds is None else self.bounds

    def to_json(self) -> dict[str, object]:
        """Return plain values for JSON.

        Values that are not finite become None; error and bounds are left out at 5 %.
        """
        values = asdict(self)
        if self.bounds is None:
            del values["error"], values["bounds"]
        return _json_ready(values)


@dataclass(frozen=True, slots=True)
class _Values:
    """A loss, and how it follows from sums over items.

    baseline, value: of the metric.
    losses: relative losses, [R], from sums of the items' numbers, [k, R].
    largest_item_loss: as in LossEstimate.
    """

    baseline: float
    value: float
    loss: float
    losses: Callable[[Array], Array]
    largest_item_loss: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Judgement of an estimate against a target.

    met: loss <= target.
    supported: met, and the deciding upper bound is <= target.
    refuted: not met, and the deciding lower bound is > target.
    enough_items: whether n is large enough. If not, neither supported nor refuted is true.
    items_needed: about how many items would decide it if all else stayed the same; None if it is decided or impossible.
    """

    target: float
    met: bool
    supported: bool
    refuted: bool
    enough_items: bool
    items_needed: int | None

    @property
    def status(self) -> str:
        """The strongest true statement: supported, met, refuted or missed."""
        if self.supported:
            return "supported"
        if self.refuted:
            return "refuted"
        return "met" if self.met else "missed"

    def to_json(self) -> dict[str, object]:
        return {"status": self.status, **asdict(self)}


@dataclass(frozen=True, slots=True)
class DistributionSummary:
    """Divergence from the reference over N tokens: KL in nats, agreement as the share of equal top-1 tokens.

    by_task: mean and standard error of each task, if the tokens are those of several.
    """

    mean: float
    standard_error: float
    q50: float
    q99: float
    max: float
    agreement: float
    n: int
    by_task: tuple[tuple[float, float], ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return plain values for JSON. Values that are not finite become None. An empty `by_task` is left out."""
        values = _json_ready(asdict(self))
        if not self.by_task:
            del values["by_task"]
        return values


def relative_loss(
    baseline: ArrayLike,
    scores: ArrayLike,
    higher_is_better: bool = True,
    score_range: float | None = 1.0,
    resamples: int = RESAMPLES,
    seed: int = SEED,
    error: float = ERROR,
) -> LossEstimate:
    """Return the loss of a metric that is the mean of its item scores.

    It is (b - v)/b, or (v - b)/b if lower is better.
    baseline, scores: [n], the same items in the same order.
    score_range: largest difference between two scores of one item; None if unbounded. The bounds then take the largest
        difference of the scores that there are.
    error: one-sided error probability of the deciding bounds.
    Raises OptionError if the baseline is not above 0, ExecutionError if a score is not finite.
    """
    b, v = _columns(baseline, scores)
    value_b, value_v = float(b.mean()), float(v.mean())
    _check_baseline(value_b, len(b))
    sign = 1.0 if higher_is_better else -1.0
    largest = max(float(np.max([b, v])), 0.0) - min(float(np.min([b, v])), 0.0) if score_range is None else score_range
    worst, best = (np.array([value_b, value_b - step]) for step in (sign * largest, -sign * largest))
    value = _Values(
        value_b,
        value_v,
        float(_loss(np.array([value_b]), np.array([value_v]), higher_is_better)[0]),
        lambda sums: _loss(sums[0], sums[1], higher_is_better),
        None if score_range is None else score_range / value_b,
    )
    return _estimate(value, np.stack([b, v]), worst, best, resamples, seed, error)


def perplexity_loss(
    baseline_nll: ArrayLike,
    baseline_tokens: ArrayLike,
    nll: ArrayLike,
    tokens: ArrayLike,
    resamples: int = RESAMPLES,
    seed: int = SEED,
    error: float = ERROR,
) -> LossEstimate:
    """Return the loss of perplexity: (v - b)/b with b, v = exp(sum nll / sum tokens), each [n] over the same items.

    Resamples draw whole items, so that numerator and denominator of the ratio vary together. The bounds count the item
    with the largest effect once more.
    Raises the errors of `relative_loss`.
    """
    columns = np.stack(_columns(baseline_nll, baseline_tokens, nll, tokens))
    n = columns.shape[1]
    value_b, value_v = (float(x) for x in _perplexities(columns.sum(axis=1)[:, None])[:, 0])
    _check_baseline(value_b, n)
    b_nll, b_tokens, v_nll, v_tokens = columns
    influence = (v_nll - v_tokens * np.log(value_v)) / v_tokens.mean() - (
        b_nll - b_tokens * np.log(value_b)
    ) / b_tokens.mean()

    def losses(sums: Array) -> Array:
        values = _perplexities(sums)
        return _loss(values[0], values[1], higher_is_better=False)

    value = _Values(value_b, value_v, (value_v - value_b) / value_b, losses)
    worst, best = columns[:, int(np.argmax(influence))], columns[:, int(np.argmin(influence))]
    return _estimate(value, columns, worst, best, resamples, seed, error)


def judge(estimate: LossEstimate, target: float) -> Verdict:
    """Judge an estimate against a target (relative, 0.02 = 2 %).

    Identical answers on few items would give an interval of width 0, so support needs a least number of items.
    A loss of the target's size, in the largest possible pieces, must show on them with a probability of 1 - error.
    On n items the least share that shows is 1 - error^(1/n), the exact form of the rule of three.
    At least MIN_ITEMS are needed in any case.
    """
    lower, upper = estimate.deciding
    floor = _items_to_support(estimate, target)
    met = estimate.loss <= target
    to_refute = estimate.n >= MIN_ITEMS
    to_support = floor is not None and estimate.n >= floor
    supported = met and to_support and upper <= target
    refuted = not met and to_refute and lower > target
    needed = None if supported or refuted else _items_needed(estimate, target, floor)
    return Verdict(target, met, supported, refuted, to_support if met else to_refute, needed)


def mean_interval95(scores: ArrayLike, resamples: int = RESAMPLES, seed: int = SEED) -> tuple[float, float]:
    """Return the two-sided 95 % percentile interval of the mean of scores [n]."""
    (column,) = _columns(scores)
    draws = _resampled_sums(column[None, :], resamples, seed)[0] / len(column)
    return _quantile(draws, 0.025), _quantile(draws, 0.975)


def perplexity_interval95(
    nll: ArrayLike, tokens: ArrayLike, resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[float, float]:
    """Return the two-sided 95 % percentile interval of exp(sum nll / sum tokens), each [n]."""
    columns = np.stack(_columns(nll, tokens))
    draws = _perplexities(_resampled_sums(columns, resamples, seed))[0]
    return _quantile(_undefined_as(draws, -math.inf), 0.025), _quantile(_undefined_as(draws, math.inf), 0.975)


def distribution_summary(kl: ArrayLike, same_top1: ArrayLike, items: ArrayLike | None = None) -> DistributionSummary:
    """Summarise KL [N] in nats and top-1 agreement [N] over N tokens.

    items: item of each token, [N], or None.
    With items, the standard error of the mean is over items, because tokens of one item are not independent (linearised
    ratio). Without items it is over tokens.
    Raises ExecutionError for an empty or non-finite input.
    """
    values, same = _columns(kl, same_top1)
    n = len(values)
    if items is None:
        residuals, sizes = values - values.mean(), np.ones(n)
    else:
        _, group = np.unique(np.asarray(items), return_inverse=True)
        residuals = np.bincount(group, weights=values - values.mean())
        sizes = np.bincount(group).astype(np.float64)
    count = len(residuals)
    error = math.inf
    if count > 1:
        error = math.sqrt(float(np.sum(residuals**2)) * count / (count - 1)) / float(np.sum(sizes))
    q50, q99 = (float(q) for q in np.quantile(values, [0.5, 0.99]))
    return DistributionSummary(
        mean=float(values.mean()),
        standard_error=error,
        q50=q50,
        q99=q99,
        max=float(values.max()),
        agreement=float(same.mean()),
        n=n,
    )


def _columns(*arrays: ArrayLike) -> list[Array]:
    """Return the arrays as float64 vectors of one common length.

    Raises ValueError for other shapes, ExecutionError for values that are not finite.
    """
    columns = [np.asarray(a, dtype=np.float64) for a in arrays]
    if any(c.ndim != 1 or len(c) != len(columns[0]) for c in columns):
        raise ValueError(f"expected vectors of one length, found shapes {[c.shape for c in columns]}")
    if not len(columns[0]):
        raise ExecutionError("there are no items to compute statistics on")
    for column in columns:
        bad = np.flatnonzero(~np.isfinite(column))
        if len(bad):
            raise ExecutionError(f"the score of item {bad[0]} is {column[bad[0]]}, expected a finite number")
    return columns


def _check_baseline(baseline: float, n: int) -> None:
    if not (baseline > 0 and math.isfinite(baseline)):
        raise OptionError(
            f"the baseline scores {baseline:g} on {n} items, so a loss relative to it is not defined",
            "name another target: `--kl`, `--bits-per-weight` or `--size`",
        )


def _loss(baseline: Array, value: Array, higher_is_better: bool) -> Array:
    """Return the relative loss, elementwise; nan where the baseline is not above 0."""
    sign = 1.0 if higher_is_better else -1.0
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return np.where(baseline > 0, sign * (baseline - value) / baseline, np.nan)


def _perplexities(sums: Array) -> Array:
    """Return perplexities from alternating NLL and token sums: [2m, R] -> [m, R]; nan where there are no tokens."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return np.where(sums[1::2] > 0, np.exp(sums[0::2] / sums[1::2]), np.nan)


def _estimate(
    value: _Values, columns: Array, worst: Array, best: Array, resamples: int, seed: int, error: float
) -> LossEstimate:
    """Build an estimate from draws of whole items.

    Its bounds come from draws of one item more. For the upper bound the further item is `worst`, for the lower `best`.
    Plain percentiles know nothing of losses that no item of the sample happened to have: a loss in a few items of 300
    was called supported in up to 20 % of samples, where 5 % were claimed.
    Measured: docs/experiments/2026-11.md, 28: Bounds with one item more.

    value: the loss, and what it is made of.
    columns: numbers of the items, [k, n]. worst, best: those of the further item, [k].
    """
    count, n = columns.shape
    draws = value.losses(_resampled_sums(columns, resamples, seed))
    padded = np.zeros((count + 1, n + 1))
    padded[:count, :n], padded[count, n] = columns, 1.0
    sums = _resampled_sums(padded, max(resamples, math.ceil(TAIL_DRAWS / error)), seed)
    low, high = (value.losses(sums[:-1] + np.outer(item, sums[-1])) for item in (best, worst))
    low, high = _undefined_as(low, -math.inf), _undefined_as(high, math.inf)
    defined = draws[np.isfinite(draws)]
    return LossEstimate(
        baseline=value.baseline,
        value=value.value,
        loss=value.loss,
        interval95=(
            _quantile(_undefined_as(draws, -math.inf), 0.025),
            _quantile(_undefined_as(draws, math.inf), 0.975),
        ),
        lower95=_quantile(low, ERROR),
        upper95=_quantile(high, 1 - ERROR),
        standard_error=float(defined.std(ddof=1)) if len(defined) > 1 and n > 1 else math.inf,
        n=n,
        largest_item_loss=value.largest_item_loss,
        error=error,
        bounds=None if error == ERROR else (_quantile(low, error), _quantile(high, 1 - error)),
    )


def _items_to_support(estimate: LossEstimate, target: float) -> int | None:
    """Return the fewest items on which a loss of the target's size would show; None if no number suffices."""
    if target <= 0 or not estimate.largest_item_loss:
        return MIN_ITEMS if target > 0 else None
    share = target / estimate.largest_item_loss  # share of items that lose everything
    if share >= 1:
        return MIN_ITEMS
    return max(MIN_ITEMS, math.ceil(math.log(estimate.error) / math.log1p(-share)))


def _items_needed(estimate: LossEstimate, target: float, floor: int | None) -> int | None:
    """Return the items at which the bound nearest to the target would reach it.

    A part of its distance shrinks as 1/sqrt(n), that of one item more as 1/n.
    """
    met = estimate.loss <= target
    distance = abs(estimate.loss - target)
    lower, upper = estimate.deciding
    width = upper - estimate.loss if met else estimate.loss - lower
    least = floor if met else MIN_ITEMS
    if least is None or distance == 0 or not math.isfinite(width):
        return None
    spread = min(width, -NormalDist().inv_cdf(estimate.error) * estimate.standard_error)
    # With x = sqrt(n / needed), spread * x + (width - spread) * x^2 is the distance.
    root = math.sqrt(spread**2 + 4 * (width - spread) * distance)
    return max(least, estimate.n + 1, math.ceil(estimate.n * ((spread + root) / (2 * distance)) ** 2))


def _json_ready(values: dict[str, object]) -> dict[str, object]:
    def ready(value: object) -> object:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        return [ready(inner) for inner in value] if isinstance(value, (tuple, list)) else value

    return {name: ready(value) for name, value in values.items()}


def _resampled_sums(columns: Array, resamples: int, seed: int) -> Array:
    """Return sums of columns [k, n] over `resamples` draws of n items with replacement: [k, resamples].

    Each column is multiplied by the counts of the items. einsum makes the order of addition independent of BLAS
    threads.
    """
    n = columns.shape[1]
    rng = np.random.default_rng(seed)
    sums = np.empty((len(columns), resamples))
    step = max(1, _CHUNK_ENTRIES // n)
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        drawn = rng.integers(0, n, size=(rows, n))
        drawn += np.arange(rows)[:, None] * n
        counts = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n).astype(np.float64)
        for k, column in enumerate(columns):
            sums[k, start : start + rows] = np.einsum("rn,n->r", counts, column)
    return sums


def _undefined_as(draws: Array, value: float) -> Array:
    """Replace undefined losses by the far end of a bound, so that they never favour the tested model."""
    return np.where(np.isnan(draws), value, draws)


def _quantile(draws: Array, q: float) -> float:
    """Return the smallest draw that a share q of the draws does not exceed.

    Without interpolation, infinite draws stay infinite.
    """
    at = max(0, math.ceil(q * len(draws)) - 1)
    return float(np.partition(draws, at)[at])


def loss_from_json(values: Mapping[str, Any]) -> LossEstimate:
    """Invert LossEstimate.to_json. A missing number is infinite, a missing bound on its side."""
    finite: dict[str, Any] = {
        "value": _stored(values["value"], math.inf),
        "loss": _stored(values["loss"], math.inf),
        "interval95": _interval(values["interval95"]),
        "lower95": _stored(values["lower95"], -math.inf),
        "upper95": _stored(values["upper95"], math.inf),
        "standard_error": _stored(values["standard_error"], math.inf),
    }
    if values.get("bounds") is not None:
        finite["bounds"] = _interval(values["bounds"])
    return LossEstimate(**{**values, **finite})


def summary_from_json(values: Mapping[str, Any]) -> DistributionSummary:
    """Invert DistributionSummary.to_json. A missing standard error is infinite."""
    error = _stored(values["standard_error"], math.inf)
    by_task = tuple((mean, _stored(error_of_task, math.inf)) for mean, error_of_task in values.get("by_task", ()))
    return DistributionSummary(**{**values, "standard_error": error, "by_task": by_task})


def _interval(values: Sequence[float | None]) -> tuple[float, float]:
    low, high = values
    return _stored(low, -math.inf), _stored(high, math.inf)


def _stored(value: float | None, otherwise: float) -> float:
    """Return a number that JSON stores as null if it is not finite."""
    return otherwise if value is None else value


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


def judge_divergence(summary: DistributionSummary, target: float, items: int, error: float = ERROR) -> str:
    """Judge a mean KL in nats per token against its target: supported, met, missed or refuted.

    With fewer than MIN_ITEMS texts their spread proves nothing. The verdict is then met or missed.
    items: number of texts.
    error: one-sided error probability.
    """
    width = NormalDist().inv_cdf(1 - error) * summary.standard_error if items >= MIN_ITEMS else math.inf
    if summary.mean <= target:
        return "supported" if summary.mean + width <= target else "met"
    return "refuted" if summary.mean - width > target else "missed"
