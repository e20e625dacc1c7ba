"""Experts on a torch device. They stay packed in its memory; products are float32.

With Triton, kernels read packed weights as they multiply, for all experts of a layer at once. Without it torch unpacks
each matrix in many small steps.
`cuda` copies through pinned buffers on its own stream, while it computes.
`torch-cpu` runs the same code on torch's CPU device. It serves only to test the code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from .. import kernels
from .device import COPY_SLOTS
from .image import ExpertForm, Part, expert_bytes, expert_form, write_image
from .torch_weights import LayerRows, compute_expert

if TYPE_CHECKING:
    from .grouped.grouped_experts import GroupedExperts


@dataclass(slots=True, eq=False)
class TorchExpert:
    """An expert on the device.

    slot: copy slot, None for a resident.
    arrived: event at the end of its copy, on cuda.
    """

    image: torch.Tensor
    form: ExpertForm
    slot: int | None = None
    arrived: torch.cuda.Event | None = None


_Added: TypeAlias = tuple[TorchExpert, np.ndarray, np.ndarray]
"""An expert and the places of its results: tokens and ranks, int32 [n] each."""


class TorchDevice:
    """A device of torch.

    resident_bytes: size of the memory for residents.
    copy_bytes: size of the largest copy; there are COPY_SLOTS buffers of this size.
    has_triton: whether Triton's kernels are used; see `grouped/triton_check.py`.
    Raises torch's own errors if the device has less memory.
    """

    host_bytes = 0

    def __init__(
        self, name: str, device: torch.device, resident_bytes: int, copy_bytes: int, has_triton: bool = False
    ) -> None:
        self.name, self._device = name, device
        self._is_cuda = self.counts_all = device.type == "cuda"
        self._arena = torch.empty(resident_bytes, dtype=torch.uint8, device=device)
        self._taken = 0
        self._slots = [torch.empty(copy_bytes, dtype=torch.uint8, device=device) for _ in range(COPY_SLOTS)]
        # On the CPU a copy is complete as soon as it is written.
        self._staging = [
            torch.empty(copy_bytes, dtype=torch.uint8, pin_memory=True) if self._is_cuda else slot
            for slot in self._slots
        ]
        self._copies = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._done: list[torch.cuda.Event | None] = [None] * COPY_SLOTS
        self._next_slot = 0
        self._hidden_states = np.empty((0, 0), np.float32)
        self._rows: LayerRows | None = None
        self._results: list[tuple[np.ndarray, np.ndarray, list[Callable[[], np.ndarray]]]] = []
        self._pending: list[_Added] = []
        self._grouped: GroupedExperts | None = None
        if has_triton:
            from .grouped.grouped_experts import GroupedExperts

            self._grouped = GroupedExperts(device)

    @property
    def used_bytes(self) -> int:
        """Largest amount of memory taken: on cuda torch's peak, on the CPU residents and copy slots. Bytes."""
        if self._is_cuda:
            return int(torch.cuda.max_memory_allocated(self._device))
        return self._arena.nbytes + sum(slot.nbytes for slot in self._slots)

    @property
    def note(self) -> str:
        """Why layers are not recorded, as text for people, or ""."""
        return "" if self._grouped is None else self._grouped.note

    def keep(self, expert: kernels.Expert) -> TorchExpert:
        """Upload an expert that stays on the device. Raises ValueError if the memory for residents is full."""
        size = expert_bytes(expert)
        free_bytes = self._arena.nbytes - self._taken
        if size > free_bytes:
            raise ValueError(f"target of an expert: expected {size} bytes, found {free_bytes} free")
        image = self._arena[self._taken : self._taken + size]
        if self._is_cuda:
            staged = torch.empty(size, dtype=torch.uint8)
            write_image(expert, staged.numpy())
            image.copy_(staged)
        else:
            write_image(expert, image.numpy())
        self._taken += size
        return TorchExpert(image, expert_form(expert))

    def copy(self, expert: kernels.Expert) -> TorchExpert:
        slot, self._next_slot = self._next_slot, (self._next_slot + 1) % COPY_SLOTS
        if any(pending.slot == slot for pending, _, _ in self._pending):
            self.launch()
        done = self._done[slot]
        if done is not None:
            done.synchronize()
        size = write_image(expert, self._staging[slot].numpy())
        image = self._slots[slot][:size]
        arrived = None
        if self._copies is not None:
            with torch.cuda.stream(self._copies):
                image.copy_(self._staging[slot][:size], non_blocking=True)
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record(self._copies)
            self._done[slot] = arrived  # `run` replaces it by an event at the end of its computation
        return TorchExpert(image, expert_form(expert), slot, arrived)

    def drop(self, expert: TorchExpert) -> None:
        """Do nothing: its slot is free when the copy has arrived."""

    def begin(self, hidden_states: np.ndarray) -> None:
        self._results, self._pending = [], []
        self._hidden_states, self._rows = hidden_states, None
        if self._grouped is not None:
            self._grouped.begin_layer()

    def run(self, expert: TorchExpert, tokens: np.ndarray, ranks: np.ndarray) -> None:
        """Add an expert to those that `launch` begins.

        tokens, ranks: where its results go, int32 [n] each.
        """
        self._pending.append((expert, tokens, ranks))

    def launch(self) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        slots = [expert.slot for expert, _, _ in pending if expert.slot is not None]
        try:
            # Triton begins kernels on the current device.
            with torch.cuda.device(self._device) if self._is_cuda else nullcontext():
                self._begin(pending)
        finally:
            if self._is_cuda and slots:  # they are free at the end of what was begun
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record(torch.cuda.current_stream(self._device))
                for slot in slots:
                    self._done[slot] = done

    def _begin(self, added: Sequence[_Added]) -> None:
        if self._grouped is None:
            self._wait_for(added)
            for expert, tokens, ranks in added:
                if self._rows is None:
                    self._rows = LayerRows(torch.from_numpy(self._hidden_states).to(self._device))
                at = torch.from_numpy(tokens.astype(np.int64)).to(self._device)
                out = compute_expert(expert.image, expert.form, self._rows, at)
                self._results.append((tokens, ranks, [partial(_read, out)]))
            return
        parts = [Part(expert.image, expert.form, tokens) for expert, tokens, _ in added]
        results = self._grouped.compute(parts, self._hidden_states, lambda: self._wait_for(added))
        all_tokens, all_ranks = (np.concatenate([row[at] for row in added]) for at in (1, 2))
        self._results.append((all_tokens, all_ranks, results))

    def _wait_for(self, added: Sequence[_Added]) -> None:
        """Let the device wait until the bytes of experts are there."""
        for expert, _, _ in added:
            if expert.arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(expert.arrived)

    def collect(self, parts: np.ndarray) -> None:
        self.launch()
        for tokens, ranks, reads in self._results:
            at = 0
            for read in reads:
                rows = read()
                parts[tokens[at : at + len(rows)], ranks[at : at + len(rows)]] = rows
                at += len(rows)
        self._results = []

    def synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self.synchronize()
        self._arena, self._rows, self._grouped = torch.empty(0), None, None
        self._slots, self._staging, self._results, self._pending = [], [], [], []
        if self._is_cuda:
            torch.cuda.empty_cache()


def _read(out: torch.Tensor) -> np.ndarray:
    return np.asarray(out.cpu().numpy())
