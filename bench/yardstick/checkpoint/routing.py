"""Routing figures of a bundle.

    python -m bench.yardstick.checkpoint.routing BUNDLE TEXT

Prints one JSON object. The figures are per layer, over forced tokens of a text:

* Popularity entropy, normalised to 1.
* Share of a token's experts that the next token uses again.
* Recall of lookahead: share of a layer's experts that its router's top-k names from the stream one layer earlier.

The weights of the yardstick were chosen so that these figures lie in ranges of trained models.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from moec.runtime import load
from moec.runtime.engine.engine import Engine
from moec.runtime.prefetch.pass_state import PassState
from moec.runtime.prefetch.predictors import LookaheadPredictor, Predictor


class Recorder(Predictor):
    """Calls the next router, predicts nothing, and counts its hits.

    found, asked: hits, and experts chosen, [L] each.
    """

    def __init__(self, engine: Engine) -> None:
        model = engine.model
        self._asked = LookaheadPredictor(engine.bundle.tables(), model.spec, model.router_norms(), model.routers())
        self._guess: set[int] = set()
        self.choices: list[list[set[int]]] = [[] for _ in model.spec.layers]
        self.found = np.zeros(model.spec.num_layers)
        self.asked = np.zeros(model.spec.num_layers)

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray | None:
        """Count hits of the earlier guess. It is called after each layer's choice, once per layer ahead."""
        if ahead > 1:
            return None
        chosen = set(state.chosen[state.layer][0].tolist())
        self.choices[state.layer].append(chosen)
        if state.layer > 0:
            self.found[state.layer] += len(chosen & self._guess)
            self.asked[state.layer] += len(chosen)
        guess = self._asked.scores(state)
        self._guess = set() if guess is None else set(np.argsort(-guess, kind="stable")[: len(chosen)].tolist())
        return None


def routing(bundle: Path, text: str, tokens: int) -> dict[str, list[float]]:
    """Return the three figures per layer, rounded."""
    with load(bundle, expert_cache="100%", context=tokens) as engine:
        recorder = Recorder(engine)
        engine.model.advisor.predictor = recorder
        for position, token in enumerate(engine.encode(text)[:tokens]):
            engine.step([token], [0], [position])
        counts = [layer.experts.count for layer in engine.model.spec.layers]
    entropy, reuse = [], []
    for count, choices in zip(counts, recorder.choices, strict=True):
        if not any(choices):  # no experts
            continue
        uses = np.bincount([expert for chosen in choices for expert in chosen], minlength=count)
        shares = uses[uses > 0] / uses.sum()
        entropy.append(round(float(-(shares * np.log(shares)).sum() / np.log(count)), 3))
        again = [len(a & b) / len(b) for a, b in pairwise(choices)]
        reuse.append(round(float(np.mean(again)), 3))
    guessed = recorder.asked > 0
    recall = np.round(recorder.found[guessed] / recorder.asked[guessed], 3).tolist()
    return {"popularity_entropy": entropy, "shared_with_next_token": reuse, "lookahead_recall": recall}


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(description="Routing figures of a bundle.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    print(json.dumps(routing(options.bundle, options.text.read_text(encoding="utf-8"), options.tokens)))


if __name__ == "__main__":
    main()
