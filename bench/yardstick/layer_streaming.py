"""Layer streaming, as STI does it: ``python -m yardstick.layer_streaming BUNDLE TEXT``.

Every expert of a layer is read for every token, the next layer's while this one computes; nothing is kept. Sharper than
STI itself, which also reads attention: here the dense weights stay. Prints one JSON object like `moec bench --json`.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from pathlib import Path

import numpy as np

from moec.cli.measurement import measure_decode, sequence_of
from moec.runtime import kernels
from moec.runtime.bundle import open_bundle
from moec.runtime.engine import Engine
from moec.runtime.model import Model
from moec.runtime.options import RuntimeOptions

LAYERS_HELD = 2


class LayerStreamingModel(Model):
    """Asks for all experts of a layer, computes those that were chosen."""

    def _compute(
        self,
        index: int,
        groups: dict[int, np.ndarray],
        normed: np.ndarray,
        weights: np.ndarray,
        hidden: np.ndarray,
        advice: list[int],
    ) -> None:
        parts = np.empty((len(hidden), weights.shape[1], hidden.shape[1]), np.float32)
        first, after = self._first_expert[index : index + 2]
        next_layer = (index + 1) % self.spec.num_layers
        ahead = range(self._first_expert[next_layer], self._first_expert[next_layer + 1])
        with closing(self._cache.stream(index, range(first, after), list(ahead), together=True)) as ready:
            for experts in ready:
                chosen = [expert for expert in experts if expert - first in groups]
                if chosen:
                    ranks = np.concatenate([groups[expert - first] for expert in chosen])
                    kernels.experts_of_token([self._experts[expert] for expert in chosen], normed, ranks, parts)
        out = np.empty_like(hidden)
        kernels.combine(parts, weights, out)
        hidden += out


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time layer streaming on the tokens of a text.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    bundle = open_bundle(options.bundle)
    cost = bundle.manifest.cost
    held = LAYERS_HELD * cost.expert_padded_bytes // bundle.manifest.model.num_layers
    sequence = sequence_of(bundle, options.text, 1, options.tokens)
    chosen = RuntimeOptions(expert_cache=str(held), context=64, threads=options.threads, prefetch="off")
    with Engine(bundle, chosen) as engine:
        engine.model.__class__ = LayerStreamingModel
        statistics, _ = measure_decode(engine, sequence, 1)
    print(json.dumps({"measured": statistics.to_plain(), "mode": engine.mode}))


if __name__ == "__main__":
    main()
