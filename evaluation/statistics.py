"""Paired bootstrap, loss estimates, verdicts, and summaries of per-token divergence.

Resampling is over items, with a fixed seed: the same scores in the same order give the same bits. Numbers that cannot
be told are infinite or nan here and null in JSON.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moec.manifests.errors import ExecutionError, OptionError

Array = NDArray[np.float64]

RESAMPLES = 10_000
SEED = 0x6D6F6563
MIN_ITEMS = 30
"""Under this many items a percentile interval is not taken as evidence."""
_CHUNK_ENTRIES = 1 << 18  # item counts per chunk: 2 MB, fits the second-level cache
_NORMAL = NormalDist()
ERROR = 0.05
"""One-sided error probability of every bound here, unless another is asked for."""
ONE_SIDED_95 = 1.645
"""Standard errors of a one-sided 95 % bound of a mean: the normal quantile of 1 - ERROR."""


@dataclass(frozen=True, slots=True)
class LossEstimate:
    """The relative loss of one model against a baseline, on the same n items.

    interval95: two-sided percentile interval; lower95 and upper95: one-sided bounds. All are relative (0.02 = 2 %).
    largest_item_loss: what one item can add to n times the loss, None where there is no bound.
    error: one-sided error probability that a verdict may have; bounds: the bounds at that, None where it is 5 %.
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
        """The one-sided bounds that a verdict goes by, lower and upper."""
        return (self.lower95, self.upper95) if self.bounds is None else self.bounds

    def to_json(self) -> dict[str, object]:
        """Plain values for JSON; what is not finite becomes None, and error and bounds are left out at 5 %."""
        values = asdict(self)
        if self.bounds is None:
            del values["error"], values["bounds"]
        return _json_ready(values)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an estimate says about a target.

    met: loss <= target. supported: met, and the one-sided upper bound (of 95 %, or as the estimate says) is <= target.
    refuted: the lower bound is > target. enough_items: n suffices to tell anything; where it does not, neither of the
    two is claimed.
    items_needed: about how many items would decide it if everything else stayed the same; None if it is decided, or
    if no number would do.
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
        """Plain values for JSON."""
        return {"status": self.status, **asdict(self)}


@dataclass(frozen=True, slots=True)
class DistributionSummary:
    """Divergence from the reference over N tokens: KL in nats, agreement as the share of equal top-1 tokens."""

    mean: float
    standard_error: float
    q50: float
    q99: float
    max: float
    agreement: float
    n: int

    def to_json(self) -> dict[str, object]:
        """Plain values for JSON; what is not finite becomes None."""
        return _json_ready(asdict(self))


def relative_loss(
    baseline: ArrayLike,
    scores: ArrayLike,
    higher_is_better: bool = True,
    score_range: float | None = 1.0,
    resamples: int = RESAMPLES,
    seed: int = SEED,
    error: float = ERROR,
) -> LossEstimate:
    """Loss of a metric that is the mean of its item scores: (b - v)/b, or (v - b)/b where lower is better.

    baseline, scores: [n], the same items in the same order. score_range: largest difference between two scores of one
    item, None if unbounded. error: of the bounds that decide. Raises OptionError if the baseline is not above 0,
    ExecutionError if a score is not finite.
    """
    b, v = _columns(baseline, scores)
    n = len(b)
    value_b, value_v = float(b.mean()), float(v.mean())
    _check_baseline(value_b, n)
    sums = _resampled_sums(np.stack([b, v]), resamples, seed)
    draws = _loss(sums[0], sums[1], higher_is_better)
    point = float(_loss(np.array([value_b]), np.array([value_v]), higher_is_better)[0])
    influence = (b * value_v / value_b - v) if higher_is_better else (v - b * value_v / value_b)
    largest = None if score_range is None else score_range / value_b
    return _estimate(value_b, value_v, point, draws, n, largest, error, influence)


def perplexity_loss(
    baseline_nll: ArrayLike,
    baseline_tokens: ArrayLike,
    nll: ArrayLike,
    tokens: ArrayLike,
    resamples: int = RESAMPLES,
    seed: int = SEED,
    error: float = ERROR,
) -> LossEstimate:
    """Loss of perplexity: (v - b)/b with b, v = exp(sum nll / sum tokens), each [n] over the same items.

    Resamples draw whole items, so that numerator and denominator of the ratio vary together. Raises as relative_loss.
    """
    columns = np.stack(_columns(baseline_nll, baseline_tokens, nll, tokens))
    n = columns.shape[1]
    value_b, value_v = (float(x) for x in _perplexities(columns.sum(axis=1)[:, None])[:, 0])
    _check_baseline(value_b, n)
    sums = _resampled_sums(columns, resamples, seed)
    values = _perplexities(sums)
    draws = _loss(values[0], values[1], higher_is_better=False)
    b_nll, b_tokens, v_nll, v_tokens = columns
    influence = (v_nll - v_tokens * np.log(value_v)) / v_tokens.mean() - (
        b_nll - b_tokens * np.log(value_b)
    ) / b_tokens.mean()
    return _estimate(value_b, value_v, (value_v - value_b) / value_b, draws, n, None, error, influence)


def judge(estimate: LossEstimate, target: float) -> Verdict:
    """Hold an estimate against a target (relative, 0.02 = 2 %).

    Identical answers on few items would give an interval of width 0, so support asks for as many items as would have
    shown, with a probability of 1 - error, a loss of the target's size that comes in the largest possible pieces
    (1 - error^(1/n), the exact form of the rule of three), and for MIN_ITEMS in any case.
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
    """Two-sided 95 % percentile interval of the mean of scores [n]."""
    (column,) = _columns(scores)
    draws = _resampled_sums(column[None, :], resamples, seed)[0] / len(column)
    return _quantile(draws, 0.025), _quantile(draws, 0.975)


def perplexity_interval95(
    nll: ArrayLike, tokens: ArrayLike, resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[float, float]:
    """Two-sided 95 % percentile interval of exp(sum nll / sum tokens), each [n]."""
    columns = np.stack(_columns(nll, tokens))
    draws = _perplexities(_resampled_sums(columns, resamples, seed))[0]
    return _quantile(_undefined_as(draws, -math.inf), 0.025), _quantile(_undefined_as(draws, math.inf), 0.975)


def distribution_summary(kl: ArrayLike, same_top1: ArrayLike, items: ArrayLike | None = None) -> DistributionSummary:
    """Summarise KL [N] in nats and top-1 agreement [N] over N tokens.

    items: [N] item of each token. With it the standard error of the mean is over items (tokens of one item are not
    independent; linearised ratio), without it over tokens. Raises ExecutionError on an empty or non-finite input.
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
    """The arrays as float64 vectors of one common length. Raises ValueError on shapes, ExecutionError on values."""
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


def _resampled_sums(columns: Array, resamples: int, seed: int) -> Array:
    """Sums of columns [k, n] over `resamples` draws of n items with replacement: [k, resamples].

    Counts per item, then a product with each column; einsum keeps the order of addition independent of BLAS threads.
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


def _loss(baseline: Array, value: Array, higher_is_better: bool) -> Array:
    """Relative loss, elementwise; nan where the baseline is not above 0."""
    sign = 1.0 if higher_is_better else -1.0
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return np.where(baseline > 0, sign * (baseline - value) / baseline, np.nan)


def _perplexities(sums: Array) -> Array:
    """[2m, R] alternating nll and token sums -> [m, R]; nan where there are no tokens."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return np.where(sums[1::2] > 0, np.exp(sums[0::2] / sums[1::2]), np.nan)


def _undefined_as(draws: Array, value: float) -> Array:
    """A resample in which the loss is not defined counts against us: at the far end of each bound."""
    return np.where(np.isnan(draws), value, draws)


def _quantile(draws: Array, q: float) -> float:
    """The smallest draw that a share q of the draws does not exceed. No interpolation: infinite draws stay so."""
    at = max(0, math.ceil(q * len(draws)) - 1)
    return float(np.partition(draws, at)[at])


def _estimate(
    baseline: float,
    value: float,
    loss: float,
    draws: Array,
    n: int,
    largest_item_loss: float | None,
    error: float,
    influence: Array,
) -> LossEstimate:
    """influence: what each item does to the loss, up to a common factor, [n]: its skew corrects the deciding bounds."""
    low, high = _undefined_as(draws, -math.inf), _undefined_as(draws, math.inf)
    defined = draws[np.isfinite(draws)]
    return LossEstimate(
        baseline=baseline,
        value=value,
        loss=loss,
        interval95=(_quantile(low, 0.025), _quantile(high, 0.975)),
        lower95=_quantile(low, ERROR),
        upper95=_quantile(high, 1 - ERROR),
        standard_error=float(defined.std(ddof=1)) if len(defined) > 1 and n > 1 else math.inf,
        n=n,
        largest_item_loss=largest_item_loss,
        error=error,
        bounds=None if error == ERROR else _corrected_bounds(loss, low, high, error, influence),
    )


def _corrected_bounds(loss: float, low: Array, high: Array, error: float, influence: Array) -> tuple[float, float]:
    """One-sided bounds, lower and upper, corrected for the bias of the draws and for skew.

    Far out in the tail, where a look with a share of the error has its bounds, plain percentiles of a loss that few
    items carry lie too near: 500 items of which ten are lost would be called too early.
    Source: Efron, Better Bootstrap Confidence Intervals (BCa), section 4.
    """
    cubes, squares = float(np.sum(influence**3)), float(np.sum(influence**2))
    acceleration = cubes / (6 * squares**1.5) if squares > 0 else 0.0
    below = float(np.mean(low < loss) + np.mean(low == loss) / 2)
    bias = _NORMAL.inv_cdf(min(max(below, 1 / len(low)), 1 - 1 / len(low)))

    def share(error: float) -> float:
        shifted = bias + _NORMAL.inv_cdf(error)
        return _NORMAL.cdf(bias + shifted / max(1 - acceleration * shifted, 0.1))

    return _quantile(low, share(error)), _quantile(high, share(1 - error))


def _items_to_support(estimate: LossEstimate, target: float) -> int | None:
    """Fewest items on which a loss of the target's size would have shown; None if no number suffices."""
    if target <= 0 or not estimate.largest_item_loss:
        return MIN_ITEMS if target > 0 else None
    share = target / estimate.largest_item_loss  # of items that lose all there is to lose
    if share >= 1:
        return MIN_ITEMS
    return max(MIN_ITEMS, math.ceil(math.log(estimate.error) / math.log1p(-share)))


def _items_needed(estimate: LossEstimate, target: float, floor: int | None) -> int | None:
    """Items at which the bound nearest to the target would reach it, its distance shrinking as 1/sqrt(n)."""
    met = estimate.loss <= target
    distance = abs(estimate.loss - target)
    lower, upper = estimate.deciding
    width = upper - estimate.loss if met else estimate.loss - lower
    least = floor if met else MIN_ITEMS
    if least is None or distance == 0 or not math.isfinite(width):
        return None
    return max(least, estimate.n + 1, math.ceil(estimate.n * (width / distance) ** 2))


def _json_ready(values: dict[str, object]) -> dict[str, object]:
    def ready(value: object) -> object:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        return [ready(part) for part in value] if isinstance(value, tuple) else value

    return {name: ready(value) for name, value in values.items()}
