"""Fitting the multidimensional policy to recorded traces, and what it is worth on others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..lossy_modes.mode_sweep import decisions_text, modes_of
from ..terminal import output
from .lossy_replay import Decided, LossyReplay
from .traces import ReplayedBundle

if TYPE_CHECKING:
    from moec.runtime.bundle.opening import Bundle
    from moec.runtime.expert_cache.counts import CacheStats
    from moec.runtime.expert_cache.eviction import PolicyScore
    from moec.runtime.options.runtime import EvictionWeights
    from moec.runtime.trace.trace import Access, Trace

SHARES = (0.1, 0.25, 0.5, 0.75)
BASELINES = ("lru", "lfu", "edgemoe")
POPULARITY = "popularity"
FITTED = ("hobbit", "hobbit-printed")
WITHOUT_LHU = "hobbit, lhu 0"
OPTIMUM = "optimum"
USUAL_TRIALS = 40  # of a fit, for the bar


@dataclass(frozen=True)
class FittedRow:
    """One policy in a cache of one size, on the held-out traces.

    penalty_bytes: mean over traces of the bytes that its misses read. ratio: mean over traces of its penalty over that
    of `best`, the baseline of the least mean penalty, with the two-sided 95 % interval of that mean over traces.
    gap_closed: share of the way from LRU to the offline optimum; None where there is none, as under lossy modes, which
    decide without the future. worst: the most that its penalty is on any trace over the least of the baselines and of
    keeping what calibration saw most, on that trace. weights: those fitted. decisions: what the modes decided on all
    held-out traces, as ModeCounts tells it; None where no mode is on.
    """

    capacity_bytes: int
    policy: str
    weights: str | None
    best: str
    penalty_bytes: float
    ratio: float
    interval: tuple[float, float]
    gap_closed: float | None
    worst: float
    decisions: dict[str, Any] | None = None


class PolicyFit:
    """Replays on a bundle: weights are fitted on the training traces, everything is compared on the held-out ones.

    options: of lossy modes, by which every replay decides again; none of a lossless run.
    """

    def __init__(
        self,
        bundle: Bundle,
        replayed: ReplayedBundle,
        training: Sequence[Trace],
        held_out: Sequence[Trace],
        options: dict[str, str] | None = None,
    ) -> None:
        self._replayed, self._options = replayed, options or {}
        self._lossy = LossyReplay(bundle, replayed, "off")
        dynamic = modes_of(self._options).dynamic_precision
        self._has_low_versions = dynamic is not None and dynamic.needs_low_versions
        self._training = [(trace, trace.accesses()) for trace in training]
        self._held_out = [(trace, trace.accesses()) for trace in held_out]

    @property
    def fitted(self) -> tuple[str, ...]:
        """The policies whose weights are fitted."""
        if not self._options:
            return FITTED
        return ("hobbit", WITHOUT_LHU) if self._has_low_versions else ("hobbit",)

    @property
    def others(self) -> tuple[str, ...]:
        """What they are compared with."""
        return ("lrfu", *BASELINES, POPULARITY, *(() if self._options else (OPTIMUM,)))

    def rows(self, capacities: Sequence[int]) -> list[FittedRow]:
        """Fit and compare at every size."""
        found: list[FittedRow] = []
        fits = len(capacities) * len(self.fitted)
        with output.Progress("fitting") as progress:
            for at, capacity in enumerate(capacities):
                policies: dict[str, tuple[str | PolicyScore, str | None]] = {name: (name, None) for name in self.others}
                for which, name in enumerate(self.fitted):
                    tell = partial(_tell, progress, at * len(self.fitted) + which, fits)
                    policies[name] = self._fit(capacity, name, tell)
                found += self._compare(capacity, policies)
        return found

    def _fit(self, capacity: int, name: str, progress: Callable[[float], None]) -> tuple[PolicyScore, str]:
        """The score of the least penalty on the training traces, and its weights as text."""
        from moec.runtime.expert_cache.eviction import MultidimensionalScore
        from moec.runtime.simulation.fitting import fit_weights

        as_printed, tried = name == "hobbit-printed", list[float]()
        has_low = self._has_low_versions and name != WITHOUT_LHU

        def penalty(weights: EvictionWeights) -> float:
            score = MultidimensionalScore(weights, as_printed)
            tried.append(sum(self._replay(trace, capacity, score).bytes_read for trace in self._training))
            progress(min(0.95, len(tried) / USUAL_TRIALS / (1 + has_low)))
            return tried[-1]

        weights, _ = fit_weights(penalty, has_low)
        return MultidimensionalScore(weights, as_printed), weights.to_text()

    def _replay(
        self, trace: tuple[Trace, Sequence[Access]], capacity: int, policy: str | PolicyScore
    ) -> CacheStats | Decided:
        """HOBBIT's penalty is what misses cost, which is what they read: less for a low version."""
        from moec.runtime.simulation.recorded_advice import no_advice
        from moec.runtime.simulation.replay import named_score, replay

        score = named_score(policy)
        if self._options and score is not None:
            return self._lossy.decide(trace[0], capacity, score, self._options, no_advice)
        return replay(trace[1], self._replayed.cache_spec(capacity), policy, self._replayed.warm)

    def _compare(self, capacity: int, policies: dict[str, tuple[str | PolicyScore, str | None]]) -> list[FittedRow]:
        import numpy as np

        from moec.evaluation.statistics import mean_interval95

        replays = {
            name: [self._replay(trace, capacity, policy) for trace in self._held_out]
            for name, (policy, _) in policies.items()
        }
        penalties = {name: np.array([each.bytes_read for each in own], np.float64) for name, own in replays.items()}
        best = min(BASELINES, key=lambda name: penalties[name].mean())
        gap = penalties["lru"].mean() - penalties[OPTIMUM].mean() if OPTIMUM in penalties else 0
        least, rows = np.min([penalties[name] for name in (*BASELINES, POPULARITY)], axis=0), []
        for name, (_, weights) in policies.items():
            # A trace on which nothing is missed says nothing of a ratio.
            ratios = np.where(penalties[best] > 0, penalties[name] / np.maximum(penalties[best], 1), 1.0)
            closed = float((penalties["lru"].mean() - penalties[name].mean()) / gap) if gap > 0 else None
            mean, ratio, interval = float(penalties[name].mean()), float(ratios.mean()), mean_interval95(ratios)
            worst = float(np.where(least > 0, penalties[name] / np.maximum(least, 1), 1.0).max())
            known = (closed, worst, _decisions(replays[name]))
            rows.append(FittedRow(capacity, name, weights, best, mean, ratio, interval, *known))
        return rows

    def gain(self, capacity: int, policy: PolicyScore, other: PolicyScore) -> tuple[float, bool]:
        """The share that a policy reads less than another, mean over held-out traces; whether that is so at 95 %."""
        import numpy as np

        from moec.evaluation.statistics import mean_interval95

        own, beside = (
            np.array([self._replay(trace, capacity, each).bytes_read for trace in self._held_out], np.float64)
            for each in (policy, other)
        )
        gains = 1 - np.where(beside > 0, own / np.maximum(beside, 1), 1.0)
        return float(gains.mean()), mean_interval95(gains)[0] > 0


def _decisions(replays: Sequence[CacheStats | Decided]) -> dict[str, Any] | None:
    """Of all replays together."""
    from moec.runtime.modes.choice import ModeCounts

    counts = [each.counts for each in replays if isinstance(each, Decided)]
    total = ModeCounts()
    for name in ModeCounts.__dataclass_fields__:
        setattr(total, name, sum(getattr(each, name) for each in counts))
    return total.to_plain() if counts else None


def _tell(progress: output.Progress, done: int, total: int, part: float) -> None:
    progress(done + part, total)


def fit_table(rows: Sequence[FittedRow], total_bytes: int) -> str:
    """For people: one line per size and policy."""
    is_lossy, lines = any(row.decisions is not None for row in rows), list[tuple[str, ...]]()
    for row in rows:
        last = decisions_text(row.decisions) if is_lossy else output.human_share(row.gap_closed)
        lines.append(
            (
                f"{row.capacity_bytes / total_bytes:.0%}",
                row.policy,
                row.weights or "",
                output.human_bytes(row.penalty_bytes),
                f"{row.ratio:.3f}",
                f"{row.interval[0]:.3f} to {row.interval[1]:.3f}",
                f"{row.worst:.3f}",
                last,
                "*" if row.policy == row.best else "",
            )
        )
    heads = ("cache", "policy", "lru,lfu,lhu,fld", "penalty", "x best", "95 %", "worst")
    return output.table(lines, (*heads, "decisions" if is_lossy else "gap closed", ""))


def fit_plain(rows: Sequence[FittedRow]) -> list[dict[str, Any]]:
    """For `--json`."""
    return [{name: getattr(row, name) for name in row.__dataclass_fields__} for row in rows]
