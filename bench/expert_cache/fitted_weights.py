"""Weights of HOBBIT's score as a compile fits them, compared on texts that neither fit nor check saw.

    python -m bench.expert_cache.fitted_weights BUNDLE DATA --task gsm8k --texts 16 --judged 64

Fits to train texts and checks on validation texts, as a compile does. Then the test texts are replayed with the default
weights, the fitted ones and LRFU. Prints the bytes read over those of the default weights, mean over three caches, with
95 % intervals over texts, and one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import accumulate
from pathlib import Path

import numpy as np

from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.cli.simulation.compile_eviction import SHARES, EvictionReplays, fit_to_texts, requests_of
from moec.cli.simulation.traces import replayed_bundle
from moec.compiler.stages.learning import routed_texts
from moec.evaluation.data import load_splits
from moec.evaluation.statistics import mean_interval95
from moec.evaluation.tasks import Item
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.options.runtime import EvictionWeights
from moec.runtime.simulation.replay import replay

MEMORY_BYTES = 4 << 30


def main() -> None:
    """Read the command line, fit, replay and print."""
    parser = argparse.ArgumentParser(description="Fitted weights of HOBBIT's score on further texts.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--task", default="gsm8k")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--judged", type=int, default=64)
    options = parser.parse_args()
    split = load_splits(options.data, options.task)

    def pairs(items: tuple[Item, ...], count: int) -> list[tuple[str, str]]:
        return [(split.task.prompt(item, ()), split.task.answer(item)) for item in items[:count]]

    with open_bundle(options.bundle) as bundle:
        model, replayed = bundle.manifest.model, replayed_bundle(bundle)
    first = list(accumulate((layer.experts.count for layer in model.layers), initial=0))
    sets = (
        (split.train.items, options.texts),
        (split.validation.items, options.texts),
        (split.test.items, options.judged),
    )
    with open_partial(options.bundle, MEMORY_BYTES) as engine:
        training, held_out, judged = (routed_texts(engine, pairs(*each), model.default_context) for each in sets)
    started = time.process_time()
    fitted = fit_to_texts(options.bundle, training, held_out, lambda done, total: None)
    if fitted is None:
        raise SystemExit("nothing is evicted")
    record = {"fit": fitted.record, "fit_seconds": round(time.process_time() - started, 1), "judged": len(judged)}
    replays = EvictionReplays(replayed, [requests_of(each, first) for each in judged])
    by_text = {"fitted": replays.by_text(EvictionWeights(**fitted.weights)), "lrfu": np.ones(len(judged))}
    for share in SHARES:
        spec = replayed.cache_spec(int(replayed.total_bytes * share))
        read, default = (
            np.array([replay(requests_of(each, first), spec, name, replayed.warm).bytes_read for each in judged])
            for name in ("lrfu", "hobbit")
        )
        by_text["lrfu"] += (read - default) / default.mean() / len(SHARES)
    for name, values in by_text.items():
        low, high = mean_interval95(values)
        record[name] = {"ratio": round(float(values.mean()), 5), "interval95": [round(low, 5), round(high, 5)]}
        print(f"{name}: {values.mean():.4f} ({low:.4f} to {high:.4f}) of the bytes of the default weights")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
