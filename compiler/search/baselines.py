"""Baselines of the search: the best uniform format, and EdgeMoE's bounds and count, with two orders of experts.

A baseline keeps the dense formats of the plan that it is compared with, so that only routed experts differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moec.manifests.model import ExpertKey
from moec.manifests.quant import QuantSpec

from ..quantization.unit_store import UnitStore
from ..request.plan import CompilePlan
from ..request.uniform import fits_all, uniform_like
from ..sensitivity.exact import LoweredPlans
from ..sensitivity.trials import Trials


@dataclass(frozen=True, slots=True)
class TargetRule:
    """The test that a plan must pass to keep the target.

    keeps: whether a plan keeps the target.
    by_size: the target is in bytes. Otherwise it is a loss or a KL.
    """

    keeps: Callable[[CompilePlan], bool]
    by_size: bool = False


@dataclass(frozen=True, slots=True)
class BaselineResult:
    """A baseline at the target.

    name: the baseline.
    plan: its plan, or None if no plan of its kind keeps the target.
    frontier: (expert packed bytes, mean KL) of every measured plan, for comparison at equal KL.
    """

    name: str
    plan: CompilePlan | None
    frontier: tuple[tuple[int, float], ...]

    def to_json(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "name": self.name,
            "expert_packed_bytes": None if self.plan is None else self.plan.expert_packed_bytes,
            "bits_per_weight": None if self.plan is None else self.plan.bits_per_weight,
            "frontier": [list(point) for point in self.frontier],
        }


def best_uniform(plan: CompilePlan, specs: Sequence[QuantSpec], trials: Trials, target: TargetRule) -> BaselineResult:
    """Return the uniform format with the fewest bytes that keeps the target.

    Formats are ranked by measured KL. Bisection finds the worst format that keeps the target. The smallest format of at
    most its KL is the result. For a target in bytes, the result is the format of least KL that keeps it.
    """
    offered = [spec for spec in specs if fits_all(plan, spec)]
    plans = [uniform_like(plan, spec) for spec in offered]
    kls = [summary.mean for summary in trials.kl_each(plans, [f"uniform {spec}" for spec in offered])]
    order = np.argsort(kls, kind="stable").tolist()
    frontier = tuple((candidate.expert_packed_bytes, kl) for candidate, kl in zip(plans, kls, strict=True))
    if target.by_size:
        within = [plans[i] for i in order if target.keeps(plans[i])]
        return BaselineResult("best uniform", within[0] if within else None, frontier)
    good = last_kept([plans[i] for i in order], target.keeps)
    keeping = [plans[i] for i in order[: good + 1]]
    best = min(keeping, key=lambda candidate: candidate.expert_packed_bytes, default=None)
    return BaselineResult("best uniform", best, frontier)


def last_kept(ordered: Sequence[CompilePlan], keeps: Callable[[CompilePlan], bool]) -> int:
    """Return the index of the last plan that keeps the target, or -1. Plans must get worse in order. Uses bisection."""
    low, high = -1, len(ordered)
    while high - low > 1:
        middle = (low + high) // 2
        if keeps(ordered[middle]):
            low = middle
        else:
            high = middle
    return low


def _boundary(ordered: Sequence[CompilePlan], target: TargetRule) -> int | None:
    """Return the index of the plan to take from ever smaller and worse plans, or None.

    For a target in bytes it is the first that keeps the target. Otherwise it is the last.
    """
    if target.by_size:
        first = last_kept(ordered, lambda plan: not target.keeps(plan)) + 1
        return first if first < len(ordered) else None
    last = last_kept(ordered, target.keeps)
    return last if last >= 0 else None


def edgemoe(
    name: str,
    plan: CompilePlan,
    formats: Mapping[float, QuantSpec],
    losses: Mapping[ExpertKey, float],
    trials: Trials,
    store: UnitStore,
    target: TargetRule,
) -> BaselineResult:
    """Return the plan of EdgeMoE's search: the n least important experts get the lower bitwidth, all others the upper.

    First it finds the two bitwidths (bounds), then n (count).
    For a target in bytes, n is the least number of experts that meets it. Otherwise it is the largest.
    name: name of the baseline.
    plan: the plan of the dense weights, which are kept.
    formats: bitwidth -> format, 16 included.
    losses: importance of each expert.
    Source: EdgeMoE, expert-wise bitwidth adaptation.
    """
    frontier: list[tuple[int, float]] = []

    def measured(candidate: CompilePlan) -> bool:
        frontier.append((candidate.expert_packed_bytes, trials.kl(candidate, name, store).mean))
        return target.keeps(candidate)

    rule = TargetRule(measured, target.by_size)
    widths = sorted(formats, reverse=True)
    uniform = [uniform_like(plan, formats[width], store.quantizer) for width in widths]
    boundary = _boundary(uniform, rule)
    if boundary is None:
        return BaselineResult(name, None, tuple(frontier))
    upper = boundary - 1 if target.by_size else boundary
    if not 0 <= upper < len(widths) - 1:
        return BaselineResult(name, uniform[boundary], tuple(frontier))
    order = sorted(losses, key=lambda key: (losses[key], key))
    lower = formats[widths[upper + 1]]
    counts = LoweredPlans(uniform[upper], lower, len(order) + 1, lambda count: order[:count])
    best = _boundary(counts, rule)
    return BaselineResult(name, uniform[boundary] if best is None else counts[best], tuple(frontier))


def weighed_by_use(
    losses: Mapping[ExpertKey, float], popularity: NDArray[np.integer], reads_per_token: Sequence[int]
) -> dict[ExpertKey, float]:
    """Return the loss of each expert per read that its lower bitwidth makes smaller.

    An expert that tokens use often saves more time at a lower bitwidth. At an equal loss it is lowered sooner. A loss
    below 0 is a gain, which counts more for such an expert. An expert without a token saves nothing: infinity.
    losses: as for `edgemoe`.
    popularity: tokens that chose the expert, [L, E].
    reads_per_token: experts that a token reads in each layer, [L].
    Source: EdgeMoE, introduction: the selection considers how much the lower bitwidth could boost inference speed. The
    measure is ours: the paper names none.
    """
    totals = np.maximum(popularity.sum(axis=1, dtype=np.float64), 1)
    reads = popularity * np.asarray(reads_per_token, np.float64)[:, None] / totals[:, None]

    def weighed(key: ExpertKey) -> float:
        loss, use = losses[key], float(reads[key.layer, key.expert])
        if loss <= 0:
            return loss * use
        return loss / use if use else math.inf

    return {key: weighed(key) for key in losses}


def bytes_at_kl(frontier: Sequence[tuple[int, float]], kl: float) -> float | None:
    """Return the bytes of a family of plans at this KL, or None outside its range.

    The result is interpolated in log KL on the lower envelope.
    """
    envelope: list[tuple[float, float]] = []
    for size, value in sorted(frontier):
        if value > 0 and (not envelope or math.log(value) < envelope[-1][1]):
            envelope.append((float(size), math.log(value)))
    if len(envelope) < 2 or not envelope[-1][1] <= math.log(max(kl, 1e-30)) <= envelope[0][1]:
        return None
    sizes, logs = np.array(envelope).T
    return float(np.interp(math.log(kl), logs[::-1], sizes[::-1]))
