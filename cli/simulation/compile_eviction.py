"""Fit the weights of HOBBIT's eviction score to the texts of a compile, for `CompileRequest.fit_eviction`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from .traces import ReplayedBundle, replayed_bundle

if TYPE_CHECKING:
    import numpy as np

    from moec.compiler.request.ports import FittedEviction, RoutedText
    from moec.runtime.options.runtime import EvictionWeights
    from moec.runtime.trace.trace import Access

SHARES = (0.25, 0.5, 0.75)
"""Shares of the experts that fit in the caches of the replays. One set of weights serves all of them."""
USUAL_TRIALS = 48


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
