"""The memory of earlier tokens, allocated once for all slots: keys and values, and states of recurrent layers.

With one native call per layer, `store_kv` in native/attention/attention_layer.cpp writes the rows.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from moec.manifests.model import ModelSpec
from moec.profiles.memory_floor import held_positions

from ..options.runtime import KvType
from ..storage.arena import HUGE_PAGE_BYTES, map_anonymous
from .recurrent_states import RecurrentStates, slot_runs
from .window_positions import WindowPositions

KV_TYPES: dict[KvType, type[np.floating[Any]]] = {"float32": np.float32, "float16": np.float16}


class KVCache:
    """Keys and values of each layer, [S, Hkv, C, Dh], float32 or float16. S slots (sequences), C context positions.

    The data that one head reads is contiguous. Positions become resident when they are written.
    Latent attention has one array for both: its values are the first features of its keys.
    All layers of an encoder share one pair of arrays.

    keys, values: by layer; None for a recurrent layer.
    of_layer: what the mixer of each layer takes: its keys and values, or its states.
    states: of recurrent layers; None if the model has none.
    windows: positions of layers with sliding windows; None if every slot has all of them.
    cross_keys, cross_values: keys and values of the prompt, by layer of a decoder with an encoder.
    prompt_lengths: positions of each slot's prompt, int32 [S].
    """

    frees_windows = True
    """Whether memory of positions that no later token sees goes back to the system."""

    def __init__(self, model: ModelSpec, slots: int, context: int, kv: KvType = "float32") -> None:
        self.slots, self.context, self._type = slots, context, KV_TYPES[kv]
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self._mappings: dict[int, mmap.mmap] = {}
        self.cross_keys: dict[int, np.ndarray] = {}
        self.cross_values: dict[int, np.ndarray] = {}
        self.prompt_lengths = np.zeros(slots, np.int32)
        self._prompts, self._known_prompts = np.zeros(slots, np.int64), 0
        self._first = model.first_decoder_layer
        is_recurrent = any(layer.recurrent is not None for layer in model.layers)
        self.states = RecurrentStates(model, slots, self.floats) if is_recurrent else None
        windows = [a.sliding_window for a in model.attentions if held_positions(model, a, context) < context]
        self.windows = WindowPositions(max(windows), slots) if windows and self.frees_windows else None
        self._windowed = set[int]()
        for index, layer in enumerate(model.layers):
            if 0 < index < self._first:
                self.keys.append(self.keys[0])
                self.values.append(self.values[0])
                continue
            attention = layer.attention
            if attention is None:
                self.keys.append(None)
                self.values.append(None)
                continue
            shape = (slots, attention.cache_heads, context, attention.cache_size)
            self.keys.append(self.zeros(shape))
            self.values.append(self.zeros(shape) if attention.cache_arrays == 2 else self.keys[-1])
            if self.windows is not None and held_positions(model, attention, context) < context:
                for array in {id(array): array for array in (self.keys[-1], self.values[-1])}.values():
                    self.windows.add(array, self._mappings[id(array)])
                    self._windowed.add(id(array))
            if layer.cross is not None:
                shape = (slots, layer.cross.cache_heads, context, layer.cross.cache_size)
                self.cross_keys[index], self.cross_values[index] = self.zeros(shape), self.zeros(shape)
        self.of_layer: list[tuple[Any, ...]] = list(zip(self.keys, self.values, strict=True))
        for index, arrays in ({} if self.states is None else self.states.layers).items():
            self.of_layer[index] = arrays

    def usable(self, slot: int, length: int) -> int:
        """Return the most positions, up to `length`, after which the text in this slot can go on."""
        for part in self._parts_with_positions():
            length = part.usable(slot, length)
        return length

    def kept(self, slot: int) -> int:
        """Return the number of positions after which this slot has a kept state, 0 without one."""
        return max((part.kept(slot) for part in self._parts_with_positions()), default=0)

    def keep(self, slot: int, position: int) -> None:
        """Let the text in this slot go on after this number of positions later. With all positions it always can."""
        for part in self._parts_with_positions():
            part.keep(slot, position)

    def begin_pass(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Prepare for a pass. slots, positions: int32 [T]. Raises ExecutionError if a text cannot go on there."""
        if parts := self._parts_with_positions():
            runs = slot_runs(slots, positions)
            for part in parts:
                part.begin_pass(runs)

    def end_pass(self) -> None:
        """Note that all layers have run."""
        for part in self._parts_with_positions():
            part.end_pass()

    def _parts_with_positions(self) -> list[RecurrentStates | WindowPositions]:
        """Return the parts that let a text go on after some of its positions only."""
        return [part for part in (self.states, self.windows) if part is not None]

    def begin_prompt(self, slot: int, length: int) -> None:
        """Set the length of the slot's new prompt."""
        self._known_prompts += 1
        self._prompts[slot], self.prompt_lengths[slot] = self._known_prompts, length

    def copy_slots(self, parents: Sequence[int], positions: int) -> None:
        """Copy to each slot i the first positions and the prompt of slot parents[i], all at once."""
        steps = _copies(parents)
        for array in self._arrays() if steps else ():
            self._copy_runs(array, steps, positions, self._first_held(array, positions))
        for _, target in steps if self.windows is not None else ():
            if target is not None and self.windows is not None:
                self.windows.moved(target, positions)
        if self.states is not None:
            self.states.copy_slots(steps, positions)
        order = np.arange(len(self._prompts))
        order[: len(parents)] = parents
        if not np.array_equal(self._prompts[order], self._prompts):  # beams of one prompt have it already
            for array in (*self.cross_keys.values(), *self.cross_values.values()):
                self._copy_runs(array, steps, int(self.prompt_lengths.max()))
            self._prompts, self.prompt_lengths = self._prompts[order], self.prompt_lengths[order]

    def prefix_parts(self, slot: int, positions: int) -> list[np.ndarray]:
        """Return what a slot keeps of its first positions as views of contiguous memory, always in one order.

        A model with an encoder has more than these. Raises ExecutionError if there is no state after so many positions.
        """
        return self._positions_of(slot, positions) + ([] if self.states is None else self.states.parts(slot, positions))

    def parts_to_fill(self, slot: int, positions: int) -> list[np.ndarray]:
        """Return the parts of `prefix_parts` to write into. The slot then goes on after so many positions."""
        states = [] if self.states is None else self.states.take_parts(slot, positions)
        if self.windows is not None:
            self.windows.moved(slot, positions)
        return self._positions_of(slot, positions) + states

    def _positions_of(self, slot: int, positions: int) -> list[np.ndarray]:
        return [
            array[slot, head, self._first_held(array, positions) : positions].reshape(-1)
            for array in self._arrays()
            for head in range(array.shape[1])
        ]

    def _arrays(self) -> list[Any]:
        """Return the arrays of the decoder's keys and values, each once."""
        pairs = zip(self.keys[self._first :], self.values[self._first :], strict=True)
        return [
            array
            for keys, values in pairs
            if keys is not None
            for array in ((keys,) if values is keys else (keys, values))
        ]

    def windowed_parts(self, slot: int, positions: int) -> list[np.ndarray]:
        """Return those of `prefix_parts` of which not all positions are held."""
        arrays = [array for array in self._arrays() if id(array) in self._windowed]
        return [array[slot, head, :positions] for array in arrays for head in range(array.shape[1])]

    def _first_held(self, array: Any, positions: int) -> int:
        """Return the first of so many positions that an array surely has."""
        return self.windows.first(positions) if self.windows is not None and id(array) in self._windowed else 0

    def _copy_runs(
        self, array: Any, steps: Sequence[tuple[int | None, int | None]], positions: int, first: int = 0
    ) -> None:
        """Copy positions from `first` on of an array [S, H, C, Dh], in the order of `_copies`."""
        spare = array[0, :, :0]
        for source, target in steps:
            if target is None:
                spare = self.copied(array[source, :, first:positions])
            else:
                array[target, :, first:positions] = spare if source is None else array[source, :, first:positions]

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """Allocate zeroed keys or values. They become resident when they are written."""
        return self._mapped(shape, self._type)

    def floats(self, shape: tuple[int, ...]) -> Any:
        """Allocate a zeroed state, float32. The part of a slot becomes resident when it is written."""
        slot_bytes = np.dtype(np.float32).itemsize * math.prod(shape[1:])
        return self._mapped(shape, np.float32, huge_pages=slot_bytes % HUGE_PAGE_BYTES == 0)

    def _mapped(self, shape: tuple[int, ...], kind: type[np.floating[Any]], huge_pages: bool = False) -> np.ndarray:
        size_bytes = np.dtype(kind).itemsize * math.prod(shape)
        # Aligned, a slot's huge pages are its own.
        spare_bytes = HUGE_PAGE_BYTES if huge_pages else 0
        mapping, memory = map_anonymous(size_bytes + spare_bytes, "keys, values and states", huge_pages)
        first = -memory.__array_interface__["data"][0] % HUGE_PAGE_BYTES if huge_pages else 0
        array = memory[first : first + size_bytes].view(kind).reshape(shape)
        self._mappings[id(array)] = mapping
        return array

    def copied(self, values: Any) -> Any:
        """Return a copy of a part."""
        return values.copy()


def _copies(parents: Sequence[int]) -> list[tuple[int | None, int | None]]:
    """Return copies from slot to slot. Done in order, they have the effect of copying all slots at once.

    (source, None) copies a slot to spare memory. (None, target) copies it from there. At most one slot is there.
    """
    waiting = {slot: parent for slot, parent in enumerate(parents) if parent != slot}
    steps: list[tuple[int | None, int | None]] = []
    while waiting:
        free = next((slot for slot in waiting if slot not in waiting.values()), None)
        if free is not None:
            steps.append((waiting.pop(free), free))
            continue
        first, source = next(iter(waiting.items()))  # only cycles are left: each slot waits for the next one
        steps.append((first, None))
        target = first
        while source != first:
            steps.append((source, target))
            del waiting[target]
            target, source = source, waiting[source]
        steps.append((None, target))
        del waiting[target]
    return steps
