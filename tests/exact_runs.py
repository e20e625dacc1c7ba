"""One bundle run in many ways that must not change a bit: with room for all experts, and for one layer's choice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moec.runtime import load
from moec.runtime.bundle.open_bundle import open_bundle
from tests.observed_runs import begin_trace, check_took_effect, counts, forget_mappings, replayed

WAYS: tuple[dict[str, Any], ...] = (
    {"prefetch": "off", "policy": "lru", "io": "mmap", "threads": 2},
    {"prefetch": "lookahead", "policy": "edgemoe", "io": "direct", "threads": 1},
    {"prefetch": "path", "policy": "hobbit", "io": "buffered", "threads": 2},
    {"prefetch": "popularity", "policy": "lfu", "io": "auto", "threads": 1},
)
"""Every prefetcher, and with it other policies, other ways to read, another number of threads."""


def check_exact(bundle: Path, tokens: Sequence[int], prompt_tokens: int = 20) -> np.ndarray:
    """Logits [T, V] of forced tokens, the same to the bit in all ways of running. Fails where they differ, or where a
    run does not do what its options say.
    """
    whole, evictions = _run(bundle, tokens, prompt_tokens, "100%", prefetch="off", threads=1)
    assert evictions == 0
    least = str(open_bundle(bundle).manifest.cost.minimum_expert_bytes)
    for way in WAYS:
        part, evictions = _run(bundle, tokens, prompt_tokens, least, **way)
        assert evictions > 0 and np.array_equal(part.view(np.uint32), whole.view(np.uint32)), way
    return whole


def _run(bundle: Path, tokens: Sequence[int], prompt_tokens: int, cache: str, **options: Any) -> tuple[np.ndarray, int]:
    forget_mappings(bundle)
    with load(bundle, expert_cache=cache, context=64, **options) as engine:
        engine.cache.finish_warming()
        tracer = begin_trace(engine)
        steps = [engine.logits(tokens[:prompt_tokens])]
        for position, token in enumerate(tokens[prompt_tokens:], prompt_tokens):
            steps.append(engine.model.logits(engine.step([token], [0], [position])))
        tracer.end()
        check_took_effect(engine, engine.options)
        if options["prefetch"] == "off":
            policy = options.get("policy", "lrfu")
            assert counts(engine.cache.stats) == counts(replayed(engine, tracer, policy)), policy
        return np.concatenate(steps), engine.cache.stats.evictions
