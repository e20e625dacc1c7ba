"""Fit the weights of HOBBIT's eviction score: to the texts of a compile, or to recorded traces.

The first is for `CompileRequest.fit_eviction`. Policies are compared on held-out traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..lossy_modes.mode_sweep import modes_of
from ..terminal import output
from ..terminal.progress_bar import ProgressBar
from ..terminal.run_statistics import decisions_text
from .lossy_replay import Decided, LossyReplay
from .traces import ReplayedBundle, replayed_bundle

if TYPE_CHECKING:
    import numpy as np

    from moec.compiler.request.ports import FittedEviction, RoutedText
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.expert_cache.cache_stats import CacheStats
    from moec.runtime.expert_cache.policies import PolicyScore
    from moec.runtime.options.runtime import EvictionWeights
    from moec.runtime.trace.trace import Access, Trace

SHARES = (0.25, 0.5, 0.75)
"""Shares of the experts that fit in the caches of the replays. One set of weights serves all of them."""
USUAL_TRIALS = 48
TRACE_SHARES = (0.1, 0.25, 0.5, 0.75)
BASELINES = ("lru", "lfu", "edgemoe")
POPULARITY = "popularity"
FITTED = ("hobbit", "hobbit-printed")
WITHOUT_LHU = "hobbit, lhu 0"
OPTIMUM = "optimum"
TRACE_TRIALS = 40  # of a fit, for the progress bar


class EvictionReplays:
    """Replays of texts on a bundle with caches of several sizes. Each text begins with the most popular experts.

    Sizes at which the default weights read nothing are left out.
    """

    def __init__(self, replayed: ReplayedBundle, texts: Sequence[Sequence[Access]]) -> None:
        from moec.runtime.expert_cache.policies import DEFAULT_WEIGHTS

        self._replayed, self._texts = replayed, texts
        sizes = [int(replayed.total_bytes * share) for share in SHARES]
        default = {size: self._read(size, DEFAULT_WEIGHTS) for size in sizes if size >= replayed.minimum_bytes}
        self._default = {capacity: read for capacity, read in default.items() if sum(read)}
        self.capacities = list(self._default)

    def _read(self, capacity: int, weights: EvictionWeights) -> list[int]:
        """Return the bytes read for each text: HOBBIT's penalty of misses."""
        from moec.runtime.expert_cache.policies import MultidimensionalScore
        from moec.runtime.simulation.fitting import replayed_bytes

        score, spec, warm = MultidimensionalScore(weights), self._replayed.cache_spec(capacity), self._replayed.warm
        return [replayed_bytes(text, spec, score, warm) for text in self._texts]

    def penalty(self, weights: EvictionWeights) -> float:
        """Return the bytes read, divided by those of the default weights: the mean over the caches."""
        return float(self.by_text(weights).mean())

    def by_text(self, weights: EvictionWeights) -> np.ndarray:
        """Return the penalty of each text, float64 [texts]. Their mean is the whole penalty; all are 1 without caches.

        A text counts by its difference to the default weights, as a share of the bytes that these read for a mean text.
        """
        import numpy as np

        penalties = np.ones(len(self._texts))
        for capacity in self.capacities:
            default = np.array(self._default[capacity])
            penalties += (np.array(self._read(capacity, weights)) - default) / default.mean() / len(self.capacities)
        return penalties


def fit_to_texts(
    bundle: Path, training: Sequence[RoutedText], held_out: Sequence[RoutedText], progress: Callable[[int, int], None]
) -> FittedEviction | None:
    """Return what `FitEviction` says."""
    from moec.compiler.request.ports import FittedEviction
    from moec.evaluation.statistics import mean_interval95
    from moec.runtime.bundle.open_bundle import open_bundle
    from moec.runtime.simulation.fitting import fit_weights

    with open_bundle(bundle, allow_partial=True) as opened:
        replayed = replayed_bundle(opened)
        first = list(accumulate((layer.experts.count for layer in opened.manifest.model.layers), initial=0))
    fitting, judging = (
        EvictionReplays(replayed, [requests_of(text, first) for text in texts]) for texts in (training, held_out)
    )
    if not fitting.capacities or not judging.capacities:
        return None
    trials = list[float]()

    def penalty(weights: EvictionWeights) -> float:
        trials.append(fitting.penalty(weights))
        progress(min(len(trials), USUAL_TRIALS - 1), USUAL_TRIALS)
        return trials[-1]

    weights, fitted = fit_weights(penalty)
    by_text = judging.by_text(weights)
    ratio, interval = float(by_text.mean()), mean_interval95(by_text)
    progress(1, 1)
    record = {
        "policy": "hobbit",
        "weights": asdict(weights),
        "texts": len(training),
        "held_out_texts": len(held_out),
        "cache_bytes": judging.capacities,
        "fitted_ratio": round(fitted, 6),
        "held_out_ratio": round(ratio, 6),
        "held_out_interval95": [round(end, 6) for end in interval],
        "kept": interval[1] < 1,
    }
    return FittedEviction(asdict(weights), interval[1] < 1, record)


def requests_of(text: RoutedText, first_expert: Sequence[int]) -> list[Access]:
    """Return the requests to the cache: those of the prompt, then those of each token."""
    requests = list[tuple[int, tuple[int, ...]]]()
    for layer, chosen in text.chosen.items():
        if text.prompt_tokens:
            experts = sorted(set(chosen[: text.prompt_tokens].reshape(-1).tolist()))
            requests.append((layer, tuple(first_expert[layer] + expert for expert in experts)))
    tokens = max(map(len, text.chosen.values()), default=0)
    for token in range(text.prompt_tokens, tokens):
        for layer, chosen in text.chosen.items():
            requests.append((layer, tuple(first_expert[layer] + expert for expert in chosen[token].tolist())))
    return requests


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
            progress(min(0.95, len(tried) / TRACE_TRIALS / (1 + has_low)))
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
