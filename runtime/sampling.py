"""From logits to a token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moec.manifests.errors import ExecutionError, OptionError


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """temperature 0 is greedy. top_k 0 and top_p 1 keep every token. Raises OptionError outside the ranges."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise OptionError(f"temperature must be 0 to 100, found {self.temperature}")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise OptionError("top-k must not be negative and top-p must be more than 0 and at most 1")
        if self.seed < 0:
            raise OptionError(f"the seed must not be negative, found {self.seed}")
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise OptionError("top-k and top-p have no effect at temperature 0", "set `--temperature`")


class Sampler:
    """Owns its random generator: one seed, one sequence."""

    def __init__(self, options: SamplingOptions) -> None:
        self._options = options
        self._generator = np.random.default_rng(options.seed)

    def __call__(self, logits: np.ndarray) -> int:
        """Pick a token. logits: [V] float32. Greedy ties: lowest id. Raises ExecutionError on NaN."""
        options = self._options
        if not np.isfinite(logits.max()):
            raise ExecutionError("the logits hold NaN or infinity", "check the bundle with `moec verify`")
        if options.temperature == 0:
            return int(np.argmax(logits))
        with np.errstate(over="ignore"):  # at a tiny temperature all but the largest become -inf
            scaled = (logits.astype(np.float64) - logits.max()) / options.temperature
        order = np.argsort(-scaled, kind="stable")
        if options.top_k:
            order = order[: options.top_k]
        weights = np.exp(scaled[order])
        weights /= weights.sum()
        if options.top_p < 1:
            # Keep the smallest set that reaches top_p; the first token always stays.
            kept = int(np.searchsorted(np.cumsum(weights), options.top_p)) + 1
            order, weights = order[:kept], weights[:kept] / weights[:kept].sum()
        return int(self._generator.choice(order, p=weights))
