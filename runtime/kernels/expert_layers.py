"""The experts of one layer for the tokens of a pass, in one call of the extension.

The specification is `Model._experts_layer` in runtime/model/forward.py. There is no numpy version.
"""

from __future__ import annotations

from typing import Any

from .packed_matrix import Floats


def experts_layer(
    layers: Any, layer: int, hidden: Floats, sequences: int = 1
) -> tuple[str, int, int, int, int, int, int]:
    """Add the output of a layer's experts to the hidden states of T tokens. Waits for experts that are not in memory.

    layers: the extension's `ExpertLayers`.
    hidden: [T, D], read and written.
    sequences: number of sequences that the tokens belong to.
    Raises ValueError.

    Returns seven values:
    1. How it ended: `done`, `failed`, `too large` or `closed`.
    2. The expert that stopped it.
    3. Nanoseconds in norm, router and shared expert.
    4. Nanoseconds in routed experts.
    5. Nanoseconds in the shared expert alone.
    6. How many different experts were chosen.
    7. How many of them had been predicted; -1 without a prediction.
    """
    outcome: tuple[str, int, int, int, int, int, int] = layers.run(layer, hidden, sequences)
    return outcome
