"""Fit the weights of HOBBIT's score to recorded traces, and compare them with other policies on held-out traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..lossy_modes.mode_sweep import modes_of
from ..terminal import output
from ..terminal.progress_bar import ProgressBar
from ..terminal.run_statistics import decisions_text
from .lossy_replay import Decided, LossyReplay
from .traces import ReplayedBundle

if TYPE_CHECKING:
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.expert_cache.cache_stats import CacheStats
    from moec.runtime.expert_cache.policies import PolicyScore
    from moec.runtime.options.runtime import EvictionWeights
    from moec.runtime.trace.trace import Access, Trace

SHARES = (0.1, 0.25, 0.5, 0.75)
BASELINES = ("lru", "lfu", "edgemoe")
POPULARITY = "popularity"
FITTED = ("hobbit", "hobbit-printed")
WITHOUT_LHU = "hobbit, lhu 0"
OPTIMUM = "optimum"
USUAL_TRIALS = 40  # of a fit, for the progress bar


class PolicyFit:
    """Replays of traces on a bundle. Weights are fitted to training traces, and compared on held-out traces.

    options: options of lossy modes, by which each replay decides again; None for exact replays.
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

    def rows(self, capacities: Sequence[int]) -> list[dict[str, Any]]:
        """Fit and compare at each capacity, bytes. Return a row for each policy, by the held-out traces.

        weights: fitted weights as text; None for a policy without weights.
        best: baseline with the smallest mean penalty.
        penalty_bytes: bytes read by misses, mean over traces.
        ratio: penalty divided by that of `best`, mean over traces.
        interval: two-sided 95 % interval of `ratio` over traces.
        gap_closed: share of the difference between LRU and the offline optimum; None without an optimum. Lossy modes
            have none, because they decide without knowledge of later requests.
        worst: largest ratio on one trace between its penalty and the smallest of the baselines and of `popularity`.
        decisions: decisions of the modes on all held-out traces, as in ModeCounts; None without a mode.
        """
        fitted: tuple[str, ...] = FITTED
        if self._options:
            fitted = ("hobbit", WITHOUT_LHU) if self._has_low_versions else ("hobbit",)
        others = ("lrfu", *BASELINES, POPULARITY, *(() if self._options else (OPTIMUM,)))
        rows: list[dict[str, Any]] = []
        with ProgressBar("fitting") as progress:
            for at, capacity in enumerate(capacities):
                policies: dict[str, tuple[str | PolicyScore, str | None]] = {name: (name, None) for name in others}
                for which, name in enumerate(fitted):
                    done, fits = at * len(fitted) + which, len(capacities) * len(fitted)
                    policies[name] = self._fit(capacity, name, partial(_add_share, progress, done, fits))
                rows += self._compare(capacity, policies)
        return rows

    def _fit(self, capacity: int, name: str, progress: Callable[[float], None]) -> tuple[PolicyScore, str]:
        """Return the score with the smallest penalty on the training traces, and its weights as text."""
        from moec.runtime.expert_cache.policies import MultidimensionalScore
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
        """Replay one trace. HOBBIT's penalty of a miss is its cost: the bytes read, fewer for a low version."""
        from moec.runtime.simulation.recorded_advice import no_advice
        from moec.runtime.simulation.replay import named_score, replay

        score = named_score(policy)
        if self._options and score is not None:
            return self._lossy.decide(trace[0], capacity, score, self._options, no_advice)
        return replay(trace[1], self._replayed.cache_spec(capacity), policy, self._replayed.warm)

    def _compare(
        self, capacity: int, policies: dict[str, tuple[str | PolicyScore, str | None]]
    ) -> list[dict[str, Any]]:
        import numpy as np

        from moec.evaluation.statistics import mean_interval95
        from moec.runtime.modes.mode_counts import ModeCounts

        replays = {
            name: [self._replay(trace, capacity, policy) for trace in self._held_out]
            for name, (policy, _) in policies.items()
        }
        penalties = {
            name: np.array([replay.bytes_read for replay in by_trace], np.float64) for name, by_trace in replays.items()
        }
        best = min(BASELINES, key=lambda name: penalties[name].mean())
        gap = penalties["lru"].mean() - penalties[OPTIMUM].mean() if OPTIMUM in penalties else 0
        least, rows = np.min([penalties[name] for name in (*BASELINES, POPULARITY)], axis=0), []
        for name, (_, weights) in policies.items():
            # A trace without misses of the baseline has no ratio.
            ratios = np.where(penalties[best] > 0, penalties[name] / np.maximum(penalties[best], 1), 1.0)
            counts, total = [replay.counts for replay in replays[name] if isinstance(replay, Decided)], ModeCounts()
            for field in ModeCounts.__dataclass_fields__:
                setattr(total, field, sum(getattr(count, field) for count in counts))
            mean = float(penalties[name].mean())
            rows.append({
                "capacity_bytes": capacity,
                "policy": name,
                "weights": weights,
                "best": best,
                "penalty_bytes": mean,
                "ratio": float(ratios.mean()),
                "interval": mean_interval95(ratios),
                "gap_closed": float((penalties["lru"].mean() - mean) / gap) if gap > 0 else None,
                "worst": float(np.where(least > 0, penalties[name] / np.maximum(least, 1), 1.0).max()),
                "decisions": total.to_plain() if counts else None,
            })  # fmt: skip
        return rows

    def gain(self, capacity: int, policy: PolicyScore, other: PolicyScore) -> tuple[float, bool]:
        """Return how much less a policy reads than another, as a share, mean over held-out traces.

        The second value is whether the share is above 0 with 95 % confidence.
        """
        import numpy as np

        from moec.evaluation.statistics import mean_interval95

        read, reference = (
            np.array([self._replay(trace, capacity, score).bytes_read for trace in self._held_out], np.float64)
            for score in (policy, other)
        )
        gains = 1 - np.where(reference > 0, read / np.maximum(reference, 1), 1.0)
        return float(gains.mean()), mean_interval95(gains)[0] > 0


def _add_share(progress: ProgressBar, done: int, total: int, share: float) -> None:
    progress(done + share, total)


def fit_table(rows: Sequence[dict[str, Any]], total_bytes: int) -> str:
    """Return a table for people, with one line per size and policy."""
    is_lossy = any(row["decisions"] is not None for row in rows)
    lines = [
        (
            f"{row['capacity_bytes'] / total_bytes:.0%}",
            row["policy"],
            row["weights"] or "",
            output.human_bytes(row["penalty_bytes"]),
            f"{row['ratio']:.3f}",
            f"{row['interval'][0]:.3f} to {row['interval'][1]:.3f}",
            f"{row['worst']:.3f}",
            decisions_text(row["decisions"]) if is_lossy else output.human_share(row["gap_closed"]),
            "*" if row["policy"] == row["best"] else "",
        )
        for row in rows
    ]
    heads = ("cache", "policy", "lru,lfu,lhu,fld", "penalty", "x best", "95 %", "worst")
    return output.table(lines, (*heads, "decisions" if is_lossy else "gap closed", ""))
