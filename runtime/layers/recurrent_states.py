"""States of recurrent layers: one of each slot that passes move on, and one that is kept for a return.

Keys and values of a text allow a return to any of its positions. A state is of one position. So each slot can also keep
the state of an earlier position, which a pass saves on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from moec.manifests.errors import ExecutionError
from moec.manifests.model import ModelSpec

_LOST = -1


@dataclass(frozen=True, slots=True)
class SlotRun:
    """The tokens of one slot in a pass: positions from `first` on, before `last`."""

    slot: int
    first: int
    last: int


def slot_runs(slots: np.ndarray, positions: np.ndarray) -> list[SlotRun]:
    """Return the tokens of a pass by slot. slots, positions: int32 [T]; the tokens of a slot are adjacent, in order."""
    if len(slots) == 1:  # a decoded token, without array operations
        return [SlotRun(int(slots[0]), int(positions[0]), int(positions[0]) + 1)]
    starts = [0, *(np.flatnonzero(np.diff(slots)) + 1).tolist(), len(slots)]
    return [
        SlotRun(int(slots[start]), int(positions[start]), int(positions[stop - 1]) + 1)
        for start, stop in pairwise(starts)
        if start < stop
    ]


class RecurrentStates:
    """States of all recurrent layers.

    layers: by index of layer, the arrays that the layer takes: live and kept ones of each part, and `kept_at`.
    kept_at: for each slot the number of positions after which the state is kept; 0 for none, int32 [S].
    """

    def __init__(self, model: ModelSpec, slots: int, zeros: Callable[[tuple[int, ...]], Any]) -> None:
        """zeros: allocates a float32 array of a shape."""
        self.kept_at = np.zeros(slots, np.int32)
        self._live, self._kept = list[np.ndarray](), list[np.ndarray]()
        # The first text of a slot writes zeros too: a page that is read before it is written costs two faults.
        self._ends, self._kept_ends = [_LOST] * slots, [0] * slots
        self._running: Sequence[SlotRun] = ()
        self.layers: dict[int, tuple[np.ndarray, ...]] = {}
        for index, layer in enumerate(model.layers):
            if layer.recurrent is not None:
                arrays = list[np.ndarray]()
                for shape in layer.recurrent.state_shapes(model.hidden_size):
                    arrays += [zeros((slots, *shape)), zeros((slots, *shape))]
                self._live += arrays[::2]
                self._kept += arrays[1::2]
                self.layers[index] = (*arrays, self.kept_at)

    def usable(self, slot: int, length: int) -> int:
        """Return the most positions, up to `length`, after which a text in this slot can go on."""
        return max(end for end in (0, self._ends[slot], self._kept_ends[slot]) if end <= length)

    def kept(self, slot: int) -> int:
        """Return the number of positions after which this slot has a kept state, 0 without one."""
        return self._kept_ends[slot]

    def keep(self, slot: int, position: int) -> None:
        """Keep the state after this number of positions: now if the slot has it, else when a pass comes by."""
        self.kept_at[slot] = position
        if self._ends[slot] == position > 0:
            _copy_slot(self._live, self._kept, slot)
            self._kept_ends[slot] = position

    def begin_pass(self, runs: Sequence[SlotRun]) -> None:
        """Bring the states of a pass to the positions where its texts go on.

        Raises ExecutionError if a slot has no state of such a position.
        """
        self._running = runs
        for run in runs:
            self._go_to(run.slot, run.first)
            self._ends[run.slot] = _LOST  # until the pass ends
            if run.first < self.kept_at[run.slot] <= run.last:
                self._kept_ends[run.slot] = 0

    def end_pass(self) -> None:
        """Note that all layers have moved on."""
        for run in self._running:
            if run.first < self.kept_at[run.slot] <= run.last:
                self._kept_ends[run.slot] = int(self.kept_at[run.slot])
            self._ends[run.slot] = run.last
        self._running = ()

    def _go_to(self, slot: int, position: int) -> None:
        if self._ends[slot] == position:
            return
        if position == 0:
            for array in self._live:
                array[slot] = 0
            self._kept_ends[slot] = 0
        elif self._kept_ends[slot] == position:
            _copy_slot(self._kept, self._live, slot)
        else:
            raise no_state(slot, position)

    def copy_slots(self, steps: Sequence[tuple[int | None, int | None]], positions: int) -> None:
        """Copy the states after so many positions from slot to slot, in the order of `kv_cache._copies`."""
        spare = list[np.ndarray]()
        for source, target in steps:
            state = spare if source is None else self.parts(source, positions)
            if target is None:
                spare = [part.copy() for part in state]
                continue
            for array, part in zip(self._live, state, strict=True):
                array[target].reshape(-1)[:] = part
            self._ends[target], self._kept_ends[target] = positions, 0

    def parts(self, slot: int, positions: int) -> list[np.ndarray]:
        """Return the state of a slot after so many positions, as contiguous views. Raises ExecutionError."""
        if positions not in (self._ends[slot], self._kept_ends[slot]):
            raise no_state(slot, positions)
        return [array[slot].reshape(-1) for array in (self._live if self._ends[slot] == positions else self._kept)]

    def take_parts(self, slot: int, positions: int) -> list[np.ndarray]:
        """Return views of the live state of a slot that will be filled with a state after so many positions."""
        self._ends[slot], self._kept_ends[slot] = positions, 0
        return [array[slot].reshape(-1) for array in self._live]


def _copy_slot(source: Sequence[np.ndarray], target: Sequence[np.ndarray], slot: int) -> None:
    for there, here in zip(source, target, strict=True):
        here[slot] = there[slot]


def no_state(slot: int, position: int) -> ExecutionError:
    """Return the error of a slot that cannot go on after so many positions."""
    return ExecutionError(
        f"slot {slot} has no state after {position} positions, because a pass failed or went on", "send the text again"
    )
