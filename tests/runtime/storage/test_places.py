"""Places: experts never overlap and never move, and their memory stays inside the capacity."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pytest import MonkeyPatch

from moec.runtime.storage import places as places_module
from moec.runtime.storage.places import Places, span_bytes

UNIT = 4


class Recorder:
    """Memory, byte by byte: where there may be some, and how often it moved. origins: which bytes came together."""

    def __init__(self, span: int) -> None:
        self.backed: set[int] = set()
        self.origins = list(range(span))
        self.calls = Counter[str]()

    def pieces(self, start: int, end: int) -> int:
        return 1 + sum(self.origins[at] != self.origins[at - 1] + 1 for at in range(start + 1, end))

    def move(self, source: int, target: int, size_bytes: int) -> None:
        self.calls["move"] += 1
        assert self.backed.issuperset(range(source, source + size_bytes))
        assert self.backed.isdisjoint(range(target, target + size_bytes))
        self.backed.difference_update(range(source, source + size_bytes))
        self.backed.update(range(target, target + size_bytes))
        self.origins[target : target + size_bytes] = self.origins[source : source + size_bytes]

    def expect(self, start: int, end: int, is_whole: bool) -> None:
        self.calls["whole" if is_whole else "part"] += 1
        assert start < end and self.backed.isdisjoint(range(start, end))
        assert not is_whole or (start % UNIT == 0 and (end - start) % UNIT == 0)
        self.backed.update(range(start, end))
        self.origins[start:end] = range(start, end)

    def give_back(self, start: int, end: int) -> None:
        assert self.backed.issuperset(range(start, end))
        self.backed.difference_update(range(start, end))

    abandon = give_back


class PlacesMachine(RuleBasedStateMachine):
    @initialize(
        sizes=st.lists(st.integers(1, 9), min_size=1, max_size=14), data=st.data(), pieces=st.sampled_from([1, 3, 99])
    )
    def begin(self, sizes: list[int], data: st.DataObject, pieces: int) -> None:
        self.patch = MonkeyPatch()
        self.patch.setattr(places_module, "MAX_PIECES", pieces)
        self.sizes, self.capacity = sizes, data.draw(st.integers(max(sizes), sum(sizes)))
        self.memory = Recorder(span_bytes(sizes))
        self.places = Places(sizes, self.memory, UNIT)
        self.places.resize(self.capacity)
        self.placed: dict[int, int] = {}

    def teardown(self) -> None:
        self.patch.undo()

    def used(self) -> int:
        return sum(self.sizes[index] for index in self.placed)

    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sizes) - 1))
        if index not in self.placed and self.used() + self.sizes[index] <= self.capacity:
            self.placed[index] = self.places.put(index)

    @precondition(lambda self: self.placed)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.placed)))
        self.places.remove(index)
        del self.placed[index]
        self.places.remove(index)  # it has none: nothing happens
        assert self.places.start(index) is None

    @precondition(lambda self: self.placed)
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        """To one of the same size, placed or not; then they change places."""
        index = data.draw(st.sampled_from(sorted(self.placed)))
        heirs = [other for other, size in enumerate(self.sizes) if size == self.sizes[index] and other != index]
        if heirs:
            heir = data.draw(st.sampled_from(heirs))
            self.places.hand_over(index, heir)
            own, self.placed[heir] = self.placed.get(heir), self.placed.pop(index)
            if own is not None:
                self.placed[index] = own

    @rule(data=st.data())
    def resize(self, data: st.DataObject) -> None:
        self.capacity = data.draw(st.integers(max(self.used(), *self.sizes), sum(self.sizes)))
        self.places.resize(self.capacity)

    @invariant()
    def holds(self) -> None:
        taken = [at for i, start in self.placed.items() for at in range(start, start + self.sizes[i])]
        assert len(set(taken)) == len(taken) and self.memory.backed.issuperset(taken)
        assert all(self.places.start(index) == start for index, start in self.placed.items())
        assert len(self.memory.backed) <= self.capacity


TestPlacesMachine = PlacesMachine.TestCase
TestPlacesMachine.settings = settings(stateful_step_count=40)


def placed(sizes: list[int], capacity: int) -> tuple[Places, Recorder]:
    memory = Recorder(span_bytes(sizes))
    places = Places(sizes, memory, UNIT)
    places.resize(capacity)
    memory.calls.clear()
    return places, memory


def test_of_one_size_no_memory_ever_moves() -> None:
    places, memory = placed([3] * 8, 15)
    for index in range(40):
        if index >= 5:
            places.remove((index - 5) % 8)
        places.put(index % 8)
    assert not memory.calls


def test_the_narrowest_gap_is_taken() -> None:
    places, memory = placed([2, 4, 2, 3, 2, 3], 13)
    for index in range(5):
        places.put(index)
    places.remove(1)
    places.remove(3)
    assert places.put(5) == 8 and not memory.calls


def test_gaps_come_together_and_what_is_missing_is_new(monkeypatch: MonkeyPatch) -> None:
    places, memory = placed([2, 4, 3, 4, 5, 9], 13)
    for index in range(4):
        places.put(index)
    places.remove(0)
    places.remove(2)
    start = places.put(4)
    assert start >= 13 and memory.calls == {"move": 2} and len(memory.backed) == 13
    places.remove(4)
    monkeypatch.setattr(places_module, "MAX_PIECES", 1)
    places.remove(1)
    start = places.put(5)
    assert start % UNIT == 0 and memory.calls == {"move": 2, "whole": 1, "part": 1}, "too many pieces: new memory"
    assert len(memory.backed) == 13


def test_a_capacity_grows_in_whole_units_and_a_rest_behind_them() -> None:
    places, memory = placed([6, 6], 6)
    assert memory.backed == set(range(6))
    places.put(0)
    places.resize(12)
    assert memory.calls == {"whole": 1, "part": 1} and len(memory.backed) == 12
    places.resize(6)
    assert memory.backed == set(range(6))
