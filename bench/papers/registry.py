"""All figures, in the order of the pages, and what is not measured."""

from __future__ import annotations

from .edgemoe import bits, counted, experts, latency, paths, sensitivity, speed, storage, throttled
from .edgemoe import caches as edgemoe_caches
from .figure import Figure
from .hobbit import caches as hobbit_caches
from .hobbit import loading, prompts, routers, stacked, systems
from .missing import NOT_MEASURED
from .mobile import little_models, rivals
from .twiddler import popularity, strategies

FIGURES: tuple[Figure, ...] = (
    *speed.FIGURES,
    *throttled.FIGURES,
    *counted.FIGURES,
    *latency.FIGURES,
    *storage.FIGURES,
    *experts.FIGURES,
    *sensitivity.FIGURES,
    *bits.FIGURES,
    *paths.FIGURES,
    *edgemoe_caches.FIGURES,
    *routers.FIGURES,
    *loading.FIGURES,
    *prompts.FIGURES,
    *systems.FIGURES,
    *stacked.FIGURES,
    *hobbit_caches.FIGURES,
    *popularity.FIGURES,
    *strategies.FIGURES,
    *little_models.FIGURES,
    *rivals.FIGURES,
)

__all__ = ["FIGURES", "NOT_MEASURED"]
