"""Routed experts of a layer for a token alone, by the extension: it has no reference here, Model's steps are one."""

from __future__ import annotations

from typing import Any

from .packed_matrix import Floats


def experts_layer(layers: Any, layer: int, hidden: Floats) -> tuple[str, int, int, int, int, int]:
    """hidden += what a layer's experts make of a token alone; waits for those that are not in memory.

    layers: the extension's `ExpertLayers`; hidden: [1, D]. Returns how it ended (`done`, `failed`, `too large` or
    `closed`) and the expert that stood in the way, nanoseconds in norm, router and shared expert, in experts, and in
    the shared one alone, and how many of the chosen experts had been predicted, -1 without a prediction. Raises
    ValueError.
    """
    found: tuple[str, int, int, int, int, int] = layers.run(layer, hidden)
    return found
