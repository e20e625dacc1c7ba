"""What the search is compared with: the best uniform format, and EdgeMoE's list and count.

All baselines keep the dense formats of the plan they are compared with, so that only routed experts differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moec.manifests.model import ExpertKey
from moec.manifests.quant import QuantSpec

from ..quantization.unit_store import UnitStore
from ..request.plan import CompilePlan
from ..request.uniform import fits_all, uniform_like
from ..sensitivity.exact import with_lowered_experts
from ..sensitivity.trials import Trials

Keeps = Callable[[CompilePlan], bool]


@dataclass(frozen=True, slots=True)
class BaselineResult:
    """A baseline at the target: its plan and size, or None where no plan of its kind keeps the target.

    frontier: (expert packed bytes, mean KL) of every plan measured, for comparison at equal KL.
    """

    name: str
    plan: CompilePlan | None
    frontier: tuple[tuple[int, float], ...]

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "name": self.name,
            "expert_packed_bytes": None if self.plan is None else self.plan.expert_packed_bytes,
            "bits_per_weight": None if self.plan is None else self.plan.bits_per_weight,
            "frontier": [list(point) for point in self.frontier],
        }


def best_uniform(
    plan: CompilePlan, specs: Sequence[QuantSpec], trials: Trials, keeps: Keeps, by_size: bool = False
) -> BaselineResult:
    """Fewest bytes over all formats that keep the target; by_size, where the target is one of bytes: least KL.

    Formats are ranked by measured KL; the worst one that still keeps the target is found by bisection, and of all at
    least as good the smallest is taken.
    """
    offered = [spec for spec in specs if fits_all(plan, spec)]
    plans = [uniform_like(plan, spec) for spec in offered]
    kls = [trials.kl(candidate, f"uniform {spec}").mean for candidate, spec in zip(plans, offered, strict=True)]
    order = np.argsort(kls, kind="stable").tolist()
    frontier = tuple((candidate.expert_packed_bytes, kl) for candidate, kl in zip(plans, kls, strict=True))
    if by_size:
        within = [plans[i] for i in order if keeps(plans[i])]
        return BaselineResult("best uniform", within[0] if within else None, frontier)
    good = _last_kept([plans[i] for i in order], keeps)
    kept = [plans[i] for i in order[: good + 1]]
    best = min(kept, key=lambda candidate: candidate.expert_packed_bytes, default=None)
    return BaselineResult("best uniform", best, frontier)


def _last_kept(ordered: Sequence[CompilePlan], keeps: Keeps) -> int:
    """Index of the last plan that keeps the target if plans only get worse; -1 for none. Bisection."""
    low, high = -1, len(ordered)
    while high - low > 1:
        middle = (low + high) // 2
        if keeps(ordered[middle]):
            low = middle
        else:
            high = middle
    return low


def _boundary(ordered: Sequence[CompilePlan], keeps: Keeps, by_size: bool) -> int | None:
    """Which of ever smaller and worse plans to take: the last that keeps a loss, the first that keeps a size."""
    if by_size:
        first = _last_kept(ordered, lambda plan: not keeps(plan)) + 1
        return first if first < len(ordered) else None
    last = _last_kept(ordered, keeps)
    return last if last >= 0 else None


def edgemoe(
    name: str,
    plan: CompilePlan,
    formats: Mapping[int, QuantSpec],
    losses: Mapping[ExpertKey, float],
    trials: Trials,
    store: UnitStore,
    keeps: Keeps,
    by_size: bool = False,
) -> BaselineResult:
    """Bounds, then a count: the n least important experts at the lower bitwidth, the rest at the upper.

    formats: bitwidth -> format, 16 included. losses: of the importance list. by_size: the target is one of bytes, so
    the fewest experts that meet it are lowered. Source: EdgeMoE, expert-wise bitwidth adaptation.
    """
    frontier: list[tuple[int, float]] = []

    def measured(candidate: CompilePlan) -> bool:
        frontier.append((candidate.expert_packed_bytes, trials.kl(candidate, name, store).mean))
        return keeps(candidate)

    widths = sorted(formats, reverse=True)
    uniform = [uniform_like(plan, formats[width], store.quantizer) for width in widths]
    kept = _boundary(uniform, measured, by_size)
    if kept is None:
        return BaselineResult(name, None, tuple(frontier))
    upper = kept - 1 if by_size else kept
    if not 0 <= upper < len(widths) - 1:
        return BaselineResult(name, uniform[kept], tuple(frontier))
    order = sorted(losses, key=lambda key: (losses[key], key))
    lower = formats[widths[upper + 1]]
    counts = [with_lowered_experts(uniform[upper], order[:count], lower) for count in range(len(order) + 1)]
    best = _boundary(counts, measured, by_size)
    return BaselineResult(name, uniform[kept] if best is None else counts[best], tuple(frontier))


def bytes_at_kl(frontier: Sequence[tuple[int, float]], kl: float) -> float | None:
    """Bytes of a family of plans at this KL, interpolated in log KL on its lower envelope; None outside it."""
    envelope: list[tuple[float, float]] = []
    for size, value in sorted(frontier):
        if value > 0 and (not envelope or math.log(value) < envelope[-1][1]):
            envelope.append((float(size), math.log(value)))
    if len(envelope) < 2 or not envelope[-1][1] <= math.log(max(kl, 1e-30)) <= envelope[0][1]:
        return None
    sizes, logs = np.array(envelope).T
    return float(np.interp(math.log(kl), logs[::-1], sizes[::-1]))
