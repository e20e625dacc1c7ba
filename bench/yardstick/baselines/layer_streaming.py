"""Layer streaming, as STI does it.

    python -m bench.yardstick.baselines.layer_streaming BUNDLE TEXT

Every expert of a layer is read for every token. The next layer is read while this one computes. Nothing is kept. STI
itself reads attention too; here the dense weights stay in memory. Prints one JSON object like `moec bench --json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path

from moec.cli.measuring.decode_speed import measure_decode, sequence_of
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.engine.engine import Engine
from moec.runtime.expert_cache.interface import StreamingCache
from moec.runtime.options.runtime import RuntimeOptions

LAYERS_HELD = 2


class WholeLayers:
    """An expert cache for the model that reads all experts of a layer and of the next, whichever are wanted."""

    def __init__(self, cache: StreamingCache, layers: list[range]) -> None:
        """Wrap a cache. layers: the experts of each layer."""
        self._cache, self._layers = cache, layers

    def stream(
        self, layer: int, wanted: Sequence[int], look_ahead: Callable[[], Sequence[int]], all_at_once: bool
    ) -> Generator[list[int], None, None]:
        """Read all experts of the layer, and yield the wanted ones as they arrive."""
        requested, following = set(wanted), self._layers[(layer + 1) % len(self._layers)]
        with closing(self._cache.stream(layer, self._layers[layer], lambda: list(following), all_at_once)) as ready:
            for experts in ready:
                chosen = [expert for expert in experts if expert in requested]
                if chosen:
                    yield chosen


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(description="Time layer streaming on the tokens of a text.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    bundle = open_bundle(options.bundle)
    cost = bundle.manifest.cost
    cache_bytes = LAYERS_HELD * cost.expert_padded_bytes // bundle.manifest.model.num_layers
    sequence = sequence_of(bundle, options.text, 1, options.tokens)
    chosen = RuntimeOptions(expert_cache=str(cache_bytes), context=64, threads=options.threads, prefetch="off")
    with Engine(bundle, chosen) as engine:
        counts = [layer.experts.count for layer in bundle.manifest.model.layers]
        layers = [range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
        engine.model.cache = WholeLayers(engine.cache, layers)  # type: ignore[assignment]
        statistics = measure_decode(engine, sequence, 1)
    print(json.dumps({"measured": statistics.to_plain(), "mode": engine.mode}))


if __name__ == "__main__":
    main()
