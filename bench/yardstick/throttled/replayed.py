"""One timed run with the decisions of lossy modes replayed.

    python -m bench.yardstick.throttled.replayed BUNDLE TEXT ...

The yardstick has random weights. The confidence of its tokens and the weights of its experts mean nothing. So the
decisions are drawn, in a fixed order, with the measured shares of a trained model. The runtime does everything else as
usual. With `--own-scores` the decisions are those of its routers. Prints one JSON object like `moec bench --json`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moec.cli.measuring.decode_speed import measure_decode, sequence_of
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.engine.engine import Engine
from moec.runtime.layers.routing import NO_EXPERT, RoutingRule
from moec.runtime.modes.decoder import LossyDecoder
from moec.runtime.modes.expert_choice import PassChoice, best_cached
from moec.runtime.options.lossy import DynamicPrecision, setting_text
from moec.runtime.options.runtime import RuntimeOptions

OPTION_NAMES = ("dynamic_precision", "big_little", "cache_routing")


@dataclass(frozen=True)
class Shares:
    """Measured shares of decisions.

    low, skipped, replaced, dropped: shares of the missed experts.
    fallback: share of the tokens that were computed again.
    prompt_low, prompt_skipped: shares of the missed experts of passes over prompts.
    """

    low: float
    skipped: float
    replaced: float
    dropped: float
    fallback: float
    prompt_low: float
    prompt_skipped: float

    @classmethod
    def of_counts(cls, counts: dict[str, Any]) -> Shares:
        """Return the shares from the `decisions` of a row of a sweep."""
        missed, prompt_missed = max(counts["missed"], 1), max(counts.get("prompt_missed", 0), 1)
        return cls(
            low=min(counts["low"] / missed, 1),
            skipped=min(counts["skipped"] / missed, 1),
            replaced=min(counts["replaced"] / missed, 1),
            dropped=min(counts["dropped"] / missed, 1),
            fallback=counts["fallback_tokens"] / max(counts["tokens"], 1),
            prompt_low=min(counts.get("prompt_low", 0) / prompt_missed, 1),
            prompt_skipped=min(counts.get("prompt_skipped", 0) / prompt_missed, 1),
        )


class ReplayedChoice(PassChoice):
    """Draws decisions instead of taking them from scores. The first expert of a token always stays high."""

    shares: Shares
    draws: random.Random

    def version(self, layer: int, expert: int, unimportance: float, dynamic: DynamicPrecision, is_missed: bool) -> int:
        if not is_missed or (unimportance == 0 and not self._is_prompt):
            return expert
        shares, low = self.shares, self._versions.low(layer, expert)
        if self._is_prompt:
            draw = self.draws.random()
            if draw < shares.prompt_skipped:
                return NO_EXPERT
            return low if low is not None and draw < shares.prompt_skipped + shares.prompt_low else expert
        # Only experts that were neither replaced nor dropped arrive here, so their shares are scaled.
        draw = self.draws.random() * max(1 - shares.replaced - shares.dropped, 1e-9)
        if draw < shares.skipped:
            return NO_EXPERT
        return low if low is not None and draw < shares.skipped + shares.low else expert

    def stand_in(
        self,
        is_cached: Callable[[int], bool],
        rule: RoutingRule,
        scores: np.ndarray,
        row: np.ndarray,
        missed: int,
        margin: float,
    ) -> int | None:
        if self.draws.random() >= self.shares.replaced:
            return None
        return best_cached(is_cached, scores, row, np.arange(len(scores)))

    def is_dropped(self, share: float, drop: float) -> bool:
        return self.draws.random() < self.shares.dropped / max(1 - self.shares.replaced, 1e-9)


class ReplayedDecoder(LossyDecoder):
    """Falls back for the measured share of tokens."""

    def __init__(self, lossy: LossyDecoder, engine: Engine, shares: Shares) -> None:
        draws = random.Random(0)

        def choices(*shared: Any, **kind: Any) -> ReplayedChoice:
            choice = ReplayedChoice(*shared, **kind)
            choice.shares, choice.draws = shares, draws
            return choice

        super().__init__(lossy.modes, engine.model, lossy.versions, lossy.cache, choices)
        self._shares, self._draws = shares, draws

    def is_unsure(self, logits: np.ndarray, gamma: float) -> np.ndarray:
        return np.array([self._draws.random() < self._shares.fallback for _ in logits])


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(description="Time a lossy mode with a trained model's decisions.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--expert-cache", default="25%")
    parser.add_argument("--own-scores", action="store_true", help="Decide by the scores of the bundle's routers.")
    parser.add_argument("--row", type=json.loads, default={}, help="A row of `moec eval --modes sweep`, as JSON.")
    chosen = parser.parse_args()
    bundle = open_bundle(chosen.bundle)
    sequence = sequence_of(bundle, chosen.text, chosen.prompt_tokens, chosen.tokens)
    modes = {name: chosen.row["options"][name] for name in OPTION_NAMES if name in chosen.row.get("options", {})}
    options = RuntimeOptions(expert_cache=chosen.expert_cache, context=512, threads=2, lossy=setting_text(modes))
    with Engine(bundle, options) as engine:
        engine.cache.finish_warming()
        if engine.lossy is not None and not chosen.own_scores:
            engine.lossy = ReplayedDecoder(engine.lossy, engine, Shares.of_counts(chosen.row["decisions"]))
        statistics = measure_decode(engine, sequence, chosen.prompt_tokens)
        counts = engine.mode_counts
    record = {"measured": statistics.to_plain(), "mode": engine.mode}
    print(json.dumps({**record, "decisions": None if counts is None else counts.to_plain()}))


if __name__ == "__main__":
    main()
