"""Choose the experts that stay on the device: after dense weights, the most popular experts until the budget is full.

Source: Twiddler, sections 3.3 and 3.4. This file is independent of the device: bytes in, indices out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moec.manifests.bundle import BundleManifest
from moec.manifests.errors import MemoryBudgetExceeded

from .device import COPY_SLOTS
from .grouped.bounds import scratch_bytes
from .latency import SAMPLE_TOKENS

_FLOAT_BYTES = 4
LIBRARY_BYTES = 64 << 20
"""Bytes on cuda for the workspaces of its libraries. torch allocates them and counts them with the rest."""
_TIMED_ROWS, _TIMED_PAIRS = SAMPLE_TOKENS[-1], COPY_SLOTS * SAMPLE_TOKENS[-1]
"""Rows and pairs of the largest layer that `latency.py` times."""
UNPACKING_BYTES = 18
"""Bytes for each weight of a matrix while it is unpacked.

They hold two forms of its codes (1 and 4 bytes and a copy of the latter), the weights, and one product.
"""


@dataclass(frozen=True, slots=True)
class ResidentExperts:
    """Experts that stay on the device, and how they fill the budget.

    resident: indices of experts, most popular first.
    fixed_bytes: dense weights, copy slots and working memory.
    """

    resident: tuple[int, ...]
    resident_bytes: int
    fixed_bytes: int
    budget_bytes: int

    def to_plain(self) -> dict[str, Any]:
        """Return the values for `--json`, with the number of resident experts instead of their indices."""
        return {**asdict(self), "resident": len(self.resident)}


def place_experts(
    sizes: Sequence[int], order: Iterable[int], budget_bytes: int, working_bytes: int, dense_bytes: int
) -> ResidentExperts:
    """Fill a budget with experts. An expert that does not fit is skipped; smaller ones after it may still stay.

    sizes: bytes of each expert on the device, [N].
    order: indices of experts that may stay, most popular first.
    dense_bytes: bytes of the dense weights that the device computes.
    Raises MemoryBudgetExceeded, with the least budget, if dense weights, copy slots and working memory do not fit.
    """
    fixed = dense_bytes + working_bytes + COPY_SLOTS * max(sizes)
    if fixed > budget_bytes:
        raise MemoryBudgetExceeded(
            f"the accelerator's budget of {budget_bytes} bytes is under its floor of {fixed} (dense weights "
            f"{dense_bytes}, {COPY_SLOTS} experts on their way, working memory {working_bytes})",
            "raise `--accelerator-memory`" + (", lower `--context`, or keep dense weights here" if dense_bytes else ""),
        )
    resident, free_bytes = [], budget_bytes - fixed
    for index in order:
        if sizes[index] <= free_bytes:
            resident.append(index)
            free_bytes -= sizes[index]
    return ResidentExperts(tuple(resident), budget_bytes - fixed - free_bytes, fixed, budget_bytes)


def working_bytes(manifest: BundleManifest, tokens: int, may_group: bool) -> int:
    """Return an upper bound of the device bytes for a layer of this many tokens, in addition to weights.

    They hold rows and their rounded form, the activations of one expert, the results of all ranks twice, and one
    unpacked matrix. Shared experts count like the others.
    may_group: whether the device may compute all experts of a layer at once, by Triton. Their activations count, too.
    """
    model, widest = manifest.model, 0
    for layer, spec in enumerate(model.layers):
        experts, shared_width = spec.experts, 0 if spec.shared is None else spec.shared.width
        shapes = [model.unit_shape(layer, projection) for projection in experts.projections] if experts.count else []
        matrix = max([rows * columns for rows, columns in shapes] + [shared_width * model.hidden_size])
        ranks = experts.top_k + (spec.shared is not None)
        per_token = (4 + 2 * ranks) * model.hidden_size + 6 * max(experts.width, shared_width)
        needed, width = tokens * per_token * _FLOAT_BYTES + matrix * UNPACKING_BYTES, max(experts.width, shared_width)
        if may_group:
            pairs, rows = max(tokens * ranks, _TIMED_PAIRS), max(tokens, _TIMED_ROWS)
            needed += scratch_bytes(pairs, rows, model.hidden_size, width)
        widest = max(widest, needed)
    return widest
