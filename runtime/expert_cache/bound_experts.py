"""Experts as the kernels take them, over the bytes that storage holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moec.manifests.bundle import ExpertEntry, unit_offsets
from moec.manifests.model import PROJECTIONS

from .. import kernels
from ..bundle.opening import Bundle
from ..storage.interface import ExpertStorage

_NO_GATE = -1


@dataclass(frozen=True, slots=True)
class BoundExperts:
    """experts: kernels.Expert per manifest entry, None if left out. parts: where gate, up and down lie in its bytes."""

    experts: list[Any]
    parts: list[list[tuple[int, int] | None]]

    def native(self, index: int) -> tuple[Any, int, int, int]:
        """What the extension knows of an expert, None if left out, and where gate (-1: none), up and down begin."""
        if self.experts[index] is None:
            return None, _NO_GATE, 0, 0
        gate, up, down = (_NO_GATE if part is None else part[0] for part in self.parts[index])
        return self.experts[index].native, gate, up, down


def bind_experts(
    bundle: Bundle, entries: Sequence[ExpertEntry], storage: ExpertStorage, dense: dict[str, Any]
) -> BoundExperts:
    """Kernels over the bytes of every manifest entry. Touches no page.

    They follow to the places that storage gives them from now on: computing with one that is not there reads another.
    """
    model, bound, parts = bundle.manifest.model, list[Any](), list[list[tuple[int, int] | None]]()
    for index, entry in enumerate(entries):
        if entry.is_pruned:
            bound.append(None)
            parts.append([])
            continue
        spec = model.layers[entry.layer].experts
        specs = {projection: entry.spec(projection) for projection in spec.projections}
        offsets, _ = unit_offsets(model, entry.layer, specs)
        block, matrices = storage.block(index), dict[str, kernels.PackedMatrix]()
        ranges = dict[str, tuple[int, int]]()
        for projection in spec.projections:
            rows, columns = model.unit_shape(entry.layer, projection)
            start = offsets[projection]
            end = start + specs[projection].packed_bytes(rows, columns)
            ranges[projection] = (start, end)
            matrices[projection] = kernels.PackedMatrix(block[start:end], rows, columns, specs[projection])
        biases = _expert_biases(dense, entry.layer, entry.expert, spec.count) if spec.has_bias else ()
        gate, up, down = matrices.get("gate"), matrices["up"], matrices["down"]
        bound.append(kernels.Expert(gate, up, down, spec.activation, spec.limit, biases))
        parts.append([ranges.get(projection) for projection in ("gate", "up", "down")])

    def follow(index: int, block: np.ndarray) -> None:
        gate, up, down = (None if part is None else block[part[0] : part[1]] for part in parts[index])
        bound[index].move_to(gate, up, down)

    storage.on_place(follow)
    return BoundExperts(bound, parts)


def _expert_biases(dense: dict[str, Any], layer: int, expert: int, count: int) -> list[np.ndarray]:
    """Of gate, up and down: the expert's part of what the layer holds one after the other."""
    whole = [dense[f"layers.{layer}.experts_{projection}_bias"] for projection in PROJECTIONS]
    return [part.reshape(count, -1)[expert] for part in whole]
