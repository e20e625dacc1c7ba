"""Predicted loss of every expert in one format, so that people can see which experts are sensitive."""

from __future__ import annotations

from typing import Any

import numpy as np

from .space import SearchSpace

_LEAST_BITS = 2.0
"""Below two bits the losses of formats say less about an expert than about the format."""


def expert_losses(space: SearchSpace) -> dict[str, Any] | None:
    """Return the predicted KL of each expert if all its projections have one format, as plain values.

    It is the offered format of fewest bits, two at least, that fits all units. None without one.
    """
    alone = space.without_pruning()
    losses, model = alone.table.losses[: len(alone.units), : len(alone.unit_specs)], alone.plain.model
    fitting = [column for column in range(losses.shape[1]) if np.isfinite(losses[:, column]).all()]
    if not fitting or not alone.units:
        return None
    most = max(model.unit_shape(unit.layer, unit.projection)[1] for unit in alone.units)
    bits = {column: alone.unit_specs[column].bits_per_weight(most) for column in fitting}
    enough = [column for column in fitting if bits[column] >= _LEAST_BITS] or fitting
    column = min(enough, key=lambda offered: bits[offered])
    table = np.full((model.num_layers, max(layer.experts.count for layer in model.layers)), np.nan)
    for unit, loss in zip(alone.units, losses[:, column], strict=True):
        before = table[unit.layer, unit.expert]
        table[unit.layer, unit.expert] = loss if np.isnan(before) else before + loss
    # A layer has as many values as experts.
    rows = [[float(value) for value in row if not np.isnan(value)] for row in table]
    return {"format": str(alone.unit_specs[column]), "losses": rows}
