"""Fitting the multidimensional policy to recorded traces, and what it is worth on others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from . import output
from .traces import ReplayedBundle

if TYPE_CHECKING:
    from moec.runtime.eviction import PolicyScore
    from moec.runtime.options import EvictionWeights
    from moec.runtime.trace import Access, Trace

SHARES = (0.1, 0.25, 0.5, 0.75)
BASELINES = ("lru", "lfu", "edgemoe")
FITTED = ("hobbit", "hobbit-printed")
OPTIMUM = "optimum"
USUAL_TRIALS = 40  # of a fit, for the bar


@dataclass(frozen=True)
class FittedRow:
    """One policy in a cache of one size, on the held-out traces.

    penalty_bytes: mean over traces of the bytes that its misses read. ratio: mean over traces of its penalty over that
    of `best`, the baseline of the least mean penalty, with the two-sided 95 % interval of that mean over traces.
    gap_closed: share of the way from LRU to the offline optimum; None where there is none. weights: those fitted.
    """

    capacity_bytes: int
    policy: str
    weights: str | None
    best: str
    penalty_bytes: float
    ratio: float
    interval: tuple[float, float]
    gap_closed: float | None


class PolicyFit:
    """Replays on a bundle: weights are fitted on the training traces, everything is compared on the held-out ones."""

    def __init__(self, replayed: ReplayedBundle, training: Sequence[Trace], held_out: Sequence[Trace]) -> None:
        self._replayed = replayed
        self._training = [trace.accesses() for trace in training]
        self._held_out = [trace.accesses() for trace in held_out]

    def rows(self, capacities: Sequence[int]) -> list[FittedRow]:
        """Fit and compare at every size."""
        found: list[FittedRow] = []
        fits = len(capacities) * len(FITTED)
        with output.Progress("fitting") as progress:
            for at, capacity in enumerate(capacities):
                policies: dict[str, tuple[str | PolicyScore, str | None]] = {
                    name: (name, None) for name in ("lrfu", *BASELINES, OPTIMUM)
                }
                for which, name in enumerate(FITTED):
                    tell = partial(_tell, progress, at * len(FITTED) + which, fits)
                    policies[name] = self._fit(capacity, name, tell)
                found += self._compare(capacity, policies)
        return found

    def _fit(self, capacity: int, name: str, progress: Callable[[float], None]) -> tuple[PolicyScore, str]:
        """The score of the least penalty on the training traces, and its weights as text."""
        from moec.runtime.eviction import MultidimensionalScore
        from moec.runtime.fitting import fit_weights

        as_printed, tried = name == "hobbit-printed", list[float]()

        def penalty(weights: EvictionWeights) -> float:
            score = MultidimensionalScore(weights, as_printed)
            tried.append(sum(self._bytes(accesses, capacity, score) for accesses in self._training))
            progress(min(0.95, len(tried) / USUAL_TRIALS))
            return tried[-1]

        weights, _ = fit_weights(penalty)
        return MultidimensionalScore(weights, as_printed), weights.to_text()

    def _bytes(self, accesses: Sequence[Access], capacity: int, policy: str | PolicyScore) -> int:
        """HOBBIT's penalty: what misses cost, which is what they read."""
        from moec.runtime.simulate import replay

        known = self._replayed
        return replay(accesses, known.sizes, capacity, known.records, policy, known.warm).bytes_read

    def _compare(self, capacity: int, policies: dict[str, tuple[str | PolicyScore, str | None]]) -> list[FittedRow]:
        import numpy as np

        from moec.evaluation.statistics import mean_interval95

        penalties = {
            name: np.array([self._bytes(accesses, capacity, policy) for accesses in self._held_out], np.float64)
            for name, (policy, _) in policies.items()
        }
        best = min(BASELINES, key=lambda name: penalties[name].mean())
        gap = penalties["lru"].mean() - penalties[OPTIMUM].mean()
        rows = []
        for name, (_, weights) in policies.items():
            # A trace on which nothing is missed says nothing of a ratio.
            ratios = np.where(penalties[best] > 0, penalties[name] / np.maximum(penalties[best], 1), 1.0)
            closed = float((penalties["lru"].mean() - penalties[name].mean()) / gap) if gap > 0 else None
            mean = float(penalties[name].mean())
            interval = mean_interval95(ratios)
            rows.append(FittedRow(capacity, name, weights, best, mean, float(ratios.mean()), interval, closed))
        return rows

    def gain(self, capacity: int, policy: PolicyScore, other: PolicyScore) -> tuple[float, bool]:
        """The share that a policy reads less than another, mean over held-out traces; whether that is so at 95 %."""
        import numpy as np

        from moec.evaluation.statistics import mean_interval95

        own, beside = (
            np.array([self._bytes(accesses, capacity, each) for accesses in self._held_out], np.float64)
            for each in (policy, other)
        )
        gains = 1 - np.where(beside > 0, own / np.maximum(beside, 1), 1.0)
        return float(gains.mean()), mean_interval95(gains)[0] > 0


def _tell(progress: output.Progress, done: int, total: int, part: float) -> None:
    progress(done + part, total)


def fit_table(rows: Sequence[FittedRow], total_bytes: int) -> str:
    """For people: one line per size and policy."""
    lines = [
        (
            f"{row.capacity_bytes / total_bytes:.0%}",
            row.policy,
            row.weights or "",
            output.human_bytes(row.penalty_bytes),
            f"{row.ratio:.3f}",
            f"{row.interval[0]:.3f} to {row.interval[1]:.3f}",
            output.human_share(row.gap_closed),
            "*" if row.policy == row.best else "",
        )
        for row in rows
    ]
    heads = ("cache", "policy", "lru,lfu,lhu,fld", "penalty", "x best", "95 %", "gap closed", "")
    return output.table(lines, heads)


def fit_plain(rows: Sequence[FittedRow]) -> list[dict[str, Any]]:
    """For `--json`."""
    return [{name: getattr(row, name) for name in row.__dataclass_fields__} for row in rows]
