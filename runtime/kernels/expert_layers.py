"""The experts of one layer for one token, in one call of the extension.

The specification is `Model._experts_layer` in runtime/model/forward.py. There is no numpy version.
"""

from __future__ import annotations

from typing import Any

from .packed_matrix import Floats


def experts_layer(layers: Any, layer: int, hidden: Floats) -> tuple[str, int, int, int, int, int]:
    """Add the output of a layer's experts to the hidden state of one token. Waits for experts that are not in memory.

    layers: the extension's `ExpertLayers`.
    hidden: [1, D], read and written.
    Raises ValueError.

    Returns six values:
    1. How it ended: `done`, `failed`, `too large` or `closed`.
    2. The expert that stopped it.
    3. Nanoseconds in norm, router and shared expert.
    4. Nanoseconds in routed experts.
    5. Nanoseconds in the shared expert alone.
    6. How many chosen experts had been predicted; -1 without a prediction.
    """
    found: tuple[str, int, int, int, int, int] = layers.run(layer, hidden)
    return found
