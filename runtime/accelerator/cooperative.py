"""Compute the experts of a layer on CPU and device at the same time, as planned, and merge the results.

A result is stored at (token, rank), whichever side computed it. The model adds the results in router-rank order.
The split therefore changes only the rounding of each result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .. import kernels
from ..options.runtime import Cooperation
from .dense import DenseLatency, DenseOnDevice
from .device import COPY_SLOTS, DeviceExpert, ExpertDevice
from .latency import LatencyModel
from .placement import ResidentExperts
from .planner import Action, ExpertLoad, LayerPlan, expert_loads, plan_layer


@dataclass(slots=True)
class CooperationCounts:
    """Experts computed so far, counted once per expert, layer and pass.

    copied_bytes: bytes that copies moved over the link.
    """

    resident: int = 0
    copied: int = 0
    cpu: int = 0
    copied_bytes: int = 0

    def add(self, plan: LayerPlan, loads: Sequence[ExpertLoad]) -> None:
        """Add one layer of one pass."""
        self.resident += plan.count(Action.RESIDENT)
        self.copied += plan.count(Action.COPY)
        self.cpu += plan.count(Action.CPU)
        self.copied_bytes += sum(load.size_bytes for load in loads if plan.actions[load.index] is Action.COPY)

    def to_text(self) -> str:
        """Return the counts as text for people."""
        return f"{self.resident} resident, {self.copied} copied, {self.cpu} on the CPU"


class CooperativeExperts:
    """Experts of one bundle, some of them on a device.

    cooperation: may be changed between passes.
    dense: dense weights on the device; None if it has none.
    uses_dense: whether the device computes them now.
    dense_note: why the CPU computes them, or "".
    kernels_note: why the device has no Triton kernels, or "".
    """

    def __init__(
        self,
        device: ExpertDevice,
        experts: Sequence[kernels.Expert],
        sizes: Sequence[int],
        is_in_host: Callable[[int], bool],
        placement: ResidentExperts,
        residents: dict[int, DeviceExpert],
        shared: dict[int, DeviceExpert],
        latency: LatencyModel,
        cooperation: Cooperation,
    ) -> None:
        """Create the experts.

        experts: all stored experts, by index, bound to host memory.
        sizes: bytes of each expert's copy on the device, int [N].
        is_in_host: returns whether the bytes of an expert are in host memory now.
        residents: experts that stay on the device, by index. shared: shared experts there, by layer.
        """
        self.device, self.latency, self.placement = device, latency, placement
        self.counts = CooperationCounts()
        self.cooperation: Cooperation = cooperation
        self._experts, self._sizes, self._is_in_host = experts, sizes, is_in_host
        self._residents, self._shared = dict(residents), dict(shared)
        self.dense: DenseOnDevice | None = None
        self.dense_latency: DenseLatency | None = None
        self.uses_dense, self.dense_note, self.kernels_note = False, "", ""

    def absent(self, experts: Sequence[int]) -> list[int]:
        return [index for index in experts if index not in self._residents]

    def begin(
        self, places_by_expert: dict[int, np.ndarray], hidden_states: np.ndarray, top_k: int, layer: int
    ) -> LayerSplit:
        """Plan a layer and start the work that the device can do at once.

        places_by_expert: for each stored expert its results, as token * top_k + rank, int [n].
        hidden_states: float32 [T, D].
        """
        tokens = {index: len(places) for index, places in places_by_expert.items()}
        loads = expert_loads(tokens, self._sizes, self._residents, self._is_in_host)
        plan = plan_layer(loads, self.latency, self.cooperation)
        by_expert = {
            index: ((places // top_k).astype(np.int32), (places % top_k).astype(np.int32))
            for index, places in places_by_expert.items()
        }
        has_shared = self.uses_dense and layer in self._shared
        shared = (self._shared[layer], top_k) if has_shared else None
        split = LayerSplit(self, plan, by_expert, hidden_states, shared)
        self.counts.add(plan, loads)
        return split

    def copy(self, index: int) -> DeviceExpert:
        """Begin to copy a stored expert. Its bytes are in host memory."""
        return self.device.copy(self._experts[index])

    def resident(self, index: int) -> DeviceExpert:
        """Return an expert that stays on the device."""
        return self._residents[index]

    def close(self) -> None:
        self._residents.clear()
        self._shared.clear()
        self.dense = None
        self.device.close()

    @property
    def mode(self) -> str:
        """Text of the `mode:` line: where experts run, the measured latencies, and the counts so far."""
        dense = "" if self.dense_latency is None else self.dense_latency.to_text()
        notes = "".join(f", {text}" for text in (dense, self.dense_note, self.kernels_note) if text)
        done = f", experts computed: {self.counts.to_text()}" if self.counts != CooperationCounts() else ""
        return (
            f"accelerator {self.device.name} for {'dense weights and ' if self.uses_dense else ''}routed experts, "
            f"cooperation {self.cooperation}, "
            f"{len(self.placement.resident)} of {len(self._sizes)} experts on it in "
            f"{self.placement.resident_bytes / 2**20:.1f} of {self.placement.budget_bytes / 2**20:.1f} MiB, measured: "
            f"{self.latency.to_text()}{notes}{done}; its sums have another order, so logits are not the "
            f"CPU's to the bit"
        )

    def to_plain(self) -> dict[str, Any]:
        # A device that does not count all of torch's memory leaves out dense weights: add the budget reserved for them.
        dense_bytes = 0 if self.dense is None or self.device.counts_all else self.dense.size_bytes
        return {
            "device": self.device.name,
            "cooperation": self.cooperation,
            "used_bytes": self.device.used_bytes + dense_bytes,
            "placement": self.placement.to_plain(),
            "latency": self.latency.to_plain(),
            "dense": None if self.dense_latency is None else self.dense_latency.to_plain(),
            "dense_is_on_device": self.uses_dense,
            "dense_note": self.dense_note or None,
            "kernels_note": self.kernels_note or None,
            "experts": asdict(self.counts),
        }


class LayerSplit:
    """One layer in progress.

    wanted: experts whose bytes are needed in host memory, in the order in which to request them.
    """

    def __init__(
        self,
        owner: CooperativeExperts,
        plan: LayerPlan,
        places: dict[int, tuple[np.ndarray, np.ndarray]],
        hidden_states: np.ndarray,
        shared: tuple[DeviceExpert, int] | None = None,
    ) -> None:
        """Start the experts that are on the device.

        places: tokens and ranks of each expert's results, int32 [n] each.
        shared: the shared expert of all tokens and its rank, or None.
        """
        self._owner, self._device, self._places = owner, owner.device, places
        self._copied = {index for index, action in plan.actions.items() if action is Action.COPY}
        resident = [index for index, action in plan.actions.items() if action is Action.RESIDENT]
        self.wanted: list[int] = list(plan.order)
        self.has_shared = shared is not None
        self.uses_device = bool(resident or self._copied or shared)
        if self.uses_device:
            self._device.begin(hidden_states)
        for index in resident:
            self._device.run(owner.resident(index), *places[index])
        if shared is not None:
            tokens = np.arange(len(hidden_states), dtype=np.int32)
            self._device.run(shared[0], tokens, np.full_like(tokens, shared[1]))
        if self.uses_device:
            self._device.launch()

    @property
    def comes_together(self) -> bool:
        """True if all copies fit in the copy slots.

        Then all experts can be taken in one call, without a wait for a slot.
        """
        return len(self._copied) <= COPY_SLOTS

    def take(self, experts: Sequence[int]) -> list[int]:
        """Begin the copies among these experts and return the experts that the CPU computes.

        experts: experts whose bytes are in host memory now.
        """
        copied = [index for index in experts if index in self._copied]
        for index in copied:
            self._device.run(self._owner.copy(index), *self._places[index])
        if copied:
            self._device.launch()
        return [index for index in experts if index not in self._copied]

    def finish(self, parts: np.ndarray) -> None:
        if self.uses_device:
            self._device.collect(parts)
