"""Which experts stay on the device: dense weights first, then the most popular experts until its budget is full.

Source: Twiddler, sections 3.3 and 3.4. Nothing here knows a device: bytes in, indices out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moec.manifests.bundle import BundleManifest
from moec.manifests.errors import MemoryBudgetExceeded

_FLOAT_BYTES = 4
LIBRARY_BYTES = 64 << 20
"""On cuda, for the workspaces of its libraries, which torch allocates and counts with the rest."""
UNPACKING_BYTES = 18
"""For each weight of a matrix while it is unpacked: two forms of its codes (1 and 4 bytes and a copy of the latter),
the weights, and one product.
"""


@dataclass(frozen=True, slots=True)
class Placement:
    """resident: indices of experts, most popular first. fixed_bytes: dense weights, copies, working memory."""

    resident: tuple[int, ...]
    resident_bytes: int
    fixed_bytes: int
    budget_bytes: int

    def to_plain(self) -> dict[str, Any]:
        """For `--json`: how many, not which."""
        return {**asdict(self), "resident": len(self.resident)}


def place_experts(
    sizes: Sequence[int], order: Iterable[int], budget_bytes: int, copy_slots: int, working_bytes: int, dense_bytes: int
) -> Placement:
    """Fill a budget. sizes: bytes of every expert on the device, [N]; order: those that may stay, most popular first.

    An expert that does not fit is passed over; smaller ones behind it may still stay. dense_bytes: of the weights that
    the device computes besides experts. Raises MemoryBudgetExceeded, with the least budget, if not even they fit.
    """
    fixed = dense_bytes + working_bytes + copy_slots * max(sizes)
    if fixed > budget_bytes:
        raise MemoryBudgetExceeded(
            f"the accelerator's budget of {budget_bytes} bytes is under its floor of {fixed} (dense weights "
            f"{dense_bytes}, {copy_slots} experts on their way, working memory {working_bytes})",
            "raise `--accelerator-memory`" + (", lower `--context`, or keep dense weights here" if dense_bytes else ""),
        )
    resident, room = [], budget_bytes - fixed
    for index in order:
        if sizes[index] <= room:
            resident.append(index)
            room -= sizes[index]
    return Placement(tuple(resident), budget_bytes - fixed - room, fixed, budget_bytes)


def working_bytes(manifest: BundleManifest, tokens: int) -> int:
    """Bytes of a device while it computes a layer of so many tokens, beside weights: an upper bound.

    Rows and their rounded form, one expert's activations, the results of all ranks twice, one matrix unpacked; shared
    experts as the others.
    """
    model, widest = manifest.model, 0
    for layer, spec in enumerate(model.layers):
        experts, shared_width = spec.experts, 0 if spec.shared is None else spec.shared.width
        shapes = [model.unit_shape(layer, projection) for projection in experts.projections] if experts.count else []
        matrix = max([rows * columns for rows, columns in shapes] + [shared_width * model.hidden_size])
        ranks = experts.top_k + (spec.shared is not None)
        per_token = (4 + 2 * ranks) * model.hidden_size + 6 * max(experts.width, shared_width)
        widest = max(widest, tokens * per_token * _FLOAT_BYTES + matrix * UNPACKING_BYTES)
    return widest
