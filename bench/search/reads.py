"""Bytes of experts that a token reads from storage under a plan: routes of held-out text, replayed through a cache.

Shapes: T tokens, L layers, K experts per token, E experts per layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moec.compiler.request.plan import CompilePlan
from moec.evaluation.tasks import Item
from moec.runtime.expert_cache.cache_spec import CacheSpec
from moec.runtime.expert_cache.records import expert_records, warm_order
from moec.runtime.simulation.replay import replay
from moec.runtime.storage.interface import page_bytes

from ..example import Example

POLICY = "lrfu"


class Routes:
    """Experts that the unquantized model chooses on texts, one token after the other.

    The same routes serve all plans. Rounding changes some of them, which is not counted.

    popularity: tokens of each expert in calibration, [L, E], for the warm start.
    """

    def __init__(self, example: Example, items: Sequence[Item], popularity: np.ndarray) -> None:
        routes = example.routes(example.texts(items))
        self.tokens, self._layers, self._experts = len(routes), popularity.shape[0], popularity.shape[1]
        self._popularity = popularity
        first = np.arange(self._layers)[:, None] * self._experts
        self._accesses = [
            (layer, tuple(sorted(experts)))
            for token in (routes + first).tolist()
            for layer, experts in enumerate(token)
        ]

    def bytes_per_token(self, plan: CompilePlan, cache_bytes: int) -> tuple[float, float]:
        """Return the bytes that a token reads, and the hit rate.

        cache_bytes: room for experts. It is full of the most popular ones at the start.
        """
        sizes = np.zeros(self._layers * self._experts, np.int64)
        for unit, spec in plan.units.items():
            rows, columns = plan.model.unit_shape(unit.layer, unit.projection)
            if not spec.is_pruned:
                sizes[unit.layer * self._experts + unit.expert] += rows * spec.row_bytes(columns)
        sizes = np.array([page_bytes(int(size)) for size in sizes], np.int64)
        layer = np.repeat(np.arange(self._layers), self._experts)
        records = expert_records(layer, self._popularity.reshape(-1), self._layers)
        stats = replay(self._accesses, CacheSpec(sizes, cache_bytes, records), POLICY, warm_order(records).tolist())
        return stats.bytes_read / self.tokens, stats.hit_rate
