"""Positions of layers with sliding windows: memory that no later token sees goes back to the system.

A slot holds the positions from `low` to its end, and the window before one kept position. Freed pages read as zeros,
and are never read: a text goes on only where its windows are held.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

from moec.profiles.memory_floor import WINDOW_STEP

from .recurrent_states import SlotRun, no_state


class WindowPositions:
    """Which positions each slot holds in the arrays of layers with windows.

    window: the largest window of the model.
    """

    def __init__(self, window: int, slots: int) -> None:
        self.window = window
        self._arrays: list[tuple[Any, mmap.mmap]] = []
        self._low, self._ends = [0] * slots, [0] * slots
        self._kept, self._wished = [0] * slots, [0] * slots
        self._running: Sequence[SlotRun] = ()

    def add(self, array: Any, memory: mmap.mmap) -> None:
        """Add an array [S, H, C, Dh] and its mapping."""
        self._arrays.append((array, memory))

    def first(self, positions: int) -> int:
        """Return the first of so many positions that the next token sees."""
        return max(0, positions - self.window + 1)

    def usable(self, slot: int, length: int) -> int:
        """Return the most positions, up to `length`, after which the text in this slot can go on."""
        if self._holds(slot, length):
            return length
        return self._kept[slot] if self._kept[slot] <= length else 0

    def _holds(self, slot: int, positions: int) -> bool:
        return positions in (0, self._kept[slot]) or self.first(positions) >= self._low[slot]

    def kept(self, slot: int) -> int:
        """Return the kept position, 0 without one."""
        return self._kept[slot]

    def keep(self, slot: int, position: int) -> None:
        """Hold the window before a position, now if the slot has it, else when a pass comes by."""
        self._wished[slot] = position
        if 0 < position <= self._ends[slot] and self._holds(slot, position):
            self._set_kept(slot, position)

    def _set_kept(self, slot: int, position: int) -> None:
        before, self._kept[slot] = self._kept[slot], position
        self._free(slot, self.first(before), min(before, self._low[slot]))

    def begin_pass(self, runs: Sequence[SlotRun]) -> None:
        """Take note of a pass. Raises ExecutionError if a slot does not hold what its first token sees."""
        self._running = runs
        for run in runs:
            slot = run.slot
            if not self._holds(slot, run.first):
                raise no_state(slot, run.first)
            if run.first < self._kept[slot]:
                self._set_kept(slot, 0)  # of a text that the pass replaces
            self._low[slot] = min(self._low[slot], self.first(run.first))
            self._free(slot, max(run.last, self._low[slot]), self._ends[slot])  # of the text before, too
            self._ends[slot] = run.last

    def end_pass(self) -> None:
        """Free what no later token sees. The last token may run again."""
        for run in self._running:
            slot, low = run.slot, self.first(run.last - 1)
            if run.first < self._wished[slot] <= run.last:
                self._set_kept(slot, self._wished[slot])
            if low >= self._low[slot] + WINDOW_STEP:
                self._free(slot, self._low[slot], low)
                self._low[slot] = low

    def moved(self, slot: int, positions: int) -> None:
        """Note that a slot now holds the window before so many positions of another text."""
        self._kept[slot] = 0
        self._free(slot, 0, self.first(positions))
        self._free(slot, positions, self._ends[slot])
        self._low[slot], self._ends[slot] = self.first(positions), positions

    def _free(self, slot: int, start: int, stop: int) -> None:
        """Free whole pages of positions, except for the window before the kept position."""
        kept = self._kept[slot]
        if start < kept and stop > self.first(kept):
            self._free_range(slot, start, self.first(kept))
            start = kept
        self._free_range(slot, start, stop)

    def _free_range(self, slot: int, start: int, stop: int) -> None:
        page = mmap.PAGESIZE
        for array, memory in self._arrays if stop > start else ():
            heads, position_bytes = array.shape[1], array.strides[2]
            for head in range(heads):
                at = slot * array.strides[0] + head * array.strides[1]
                begin = -(-(at + start * position_bytes) // page) * page
                size = (at + stop * position_bytes) // page * page - begin
                if size > 0:
                    memory.madvise(mmap.MADV_DONTNEED, begin, size)
