"""Experts in the form of the kernels, over the bytes in storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moec.manifests.bundle import BundleManifest, ExpertEntry, unit_offsets
from moec.manifests.errors import OptionError
from moec.manifests.model import PROJECTIONS

from .. import kernels
from ..bundle.open_bundle import Bundle
from ..options.runtime import RuntimeOptions
from ..storage.interface import ExpertStorage

_NO_GATE = -1


@dataclass(frozen=True, slots=True)
class BoundExperts:
    """Experts with their kernels.

    experts: kernels.Expert of each manifest entry; None for one that is left out.
    parts: start and end of gate, up and down in the bytes of each expert; None without a gate.
    """

    experts: list[Any]
    parts: list[list[tuple[int, int] | None]]

    def native(self, index: int) -> tuple[Any, int, int, int]:
        """Return an expert for the extension, None if it is left out, and the offsets of gate, up and down.

        The offset of the gate is -1 without a gate.
        """
        if self.experts[index] is None:
            return None, _NO_GATE, 0, 0
        gate, up, down = (_NO_GATE if ends is None else ends[0] for ends in self.parts[index])
        return self.experts[index].native, gate, up, down


def check_activations(manifest: BundleManifest, options: RuntimeOptions) -> None:
    """Check that the experts of a run can read activations of its type. Raises OptionError."""
    if options.modes.expert_activations is None:
        return
    if options.accelerator is not None:
        raise OptionError(
            "an accelerator reads the activations of experts as float32",
            "leave out `--accelerator` or `expert-activations`",
        )
    remedy = "leave out `expert-activations`"
    entries = (entry for entry in manifest.stored_experts if not entry.is_pruned)
    if not any(
        entry.spec(projection).float_type == "bfloat16"
        for entry in entries
        for projection in manifest.model.layers[entry.layer].experts.projections
    ):
        raise OptionError("no expert of the bundle has bfloat16 weights, which read bfloat16 activations", remedy)
    if not kernels.bfloat_kernels():
        reason = f"the kernels `{kernels.active()}` have no products of bfloat16"
        raise OptionError(f"{reason}, which need AVX-512 BF16 or AMX BF16", remedy)


def bind_experts(
    bundle: Bundle,
    entries: Sequence[ExpertEntry],
    storage: ExpertStorage,
    dense: dict[str, Any],
    reads_bfloats: bool = False,
) -> BoundExperts:
    """Return kernels over the bytes of every manifest entry. Touches no page.

    The kernels are bound again when an expert gets another place in storage. An expert that is absent must not be
    computed, because its place may hold another expert.
    reads_bfloats: see `kernels.Expert`.
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
        biases = list[np.ndarray]()  # a layer stores those of all experts in a row
        for projection in PROJECTIONS if spec.has_bias else ():
            of_layer = dense[f"layers.{entry.layer}.experts_{projection}_bias"]
            biases.append(of_layer.reshape(spec.count, -1)[entry.expert])
        gate, up, down = matrices.get("gate"), matrices["up"], matrices["down"]
        bound.append(kernels.Expert(gate, up, down, spec.activation, spec.limit, biases, reads_bfloats))
        parts.append([ranges.get(projection) for projection in ("gate", "up", "down")])

    def rebind(index: int, block: np.ndarray) -> None:
        gate, up, down = (None if ends is None else block[ends[0] : ends[1]] for ends in parts[index])
        bound[index].move_to(gate, up, down)

    storage.on_place(rebind)
    return BoundExperts(bound, parts)
