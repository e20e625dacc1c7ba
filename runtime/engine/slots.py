"""Slots of the engine: keys and values of a text stay in one, and a later text with the same beginning reuses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..layers.kv_cache import KVCache

KEPT_BEFORE_END = 16
"""Tokens at the end of a prompt that a later one may lack: the next turn of a chat writes them in another way."""


@dataclass(slots=True)
class Slot:
    """One slot of the engine's keys and values.

    tokens: tokens whose keys and values are in the slot, from position 0. They stay when a request ends.
    used: number of the request that took the slot last; 0 for none.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    used: int = 0
    is_free: bool = True


@dataclass(frozen=True, slots=True)
class Placement:
    """A slot for a request.

    slot: the slot, no longer free.
    reused: tokens at the beginning of the request that need not be computed.
    source: slot from which they must be copied; None if they are in place.
    """

    slot: Slot
    reused: int
    source: Slot | None


class SlotPool:
    """All slots. A request gets the keys and values of the longest common beginning, from its slot or by a copy.

    can_reuse: whether keys and values depend on nothing but the tokens before. A slot may then be reused.
    kv: what the slots keep. A slot with recurrent states goes on after few of its positions only.
    """

    def __init__(self, count: int, can_reuse: bool, kv: KVCache) -> None:
        self.slots = [Slot(index) for index in range(count)]
        self.can_reuse, self.kv, self._requests = can_reuse, kv, 0

    def begin(self, keeps_tokens: bool) -> None:
        """Make all slots free. They hold nothing then, unless `keeps_tokens`."""
        for slot in self.slots:
            slot.is_free = True
            if not (keeps_tokens and self.can_reuse):
                slot.tokens, slot.used = [], 0

    @property
    def free(self) -> int:
        """Number of free slots."""
        return sum(slot.is_free for slot in self.slots)

    def longest(self, tokens: Sequence[int]) -> tuple[int, Slot | None]:
        """Return the most tokens at the beginning of a text that a slot holds, and the slot. One token is left over."""
        if not self.can_reuse:
            return 0, None
        most = len(tokens) - 1
        lengths = [self.kv.usable(slot.index, min(common_length(slot.tokens, tokens), most)) for slot in self.slots]
        closest = max(self.slots, key=lambda slot: (lengths[slot.index], slot.is_free, slot.used))
        length = lengths[closest.index]
        return (length, closest) if length > 0 else (0, None)

    def place(self, tokens: Sequence[int], reuses: bool = True) -> Placement:
        """Take one of the free slots for a text. There must be one.

        The slot with the longest common beginning is taken, if this is at least half of what the slot holds. Otherwise
        the beginning is copied into the least recently used slot, so that the other text stays.
        """
        length, source = self.longest(tokens) if reuses else (0, None)
        oldest = min((slot for slot in self.slots if slot.is_free), key=lambda slot: slot.used)
        slot = oldest
        if source is not None and source.is_free and (2 * length >= len(source.tokens) or source is oldest):
            slot, source = source, None
        self._requests += 1
        slot.is_free, slot.used = False, self._requests
        shared = max(common_length(other.tokens, tokens) for other in self.slots) if reuses else 0
        slot.tokens = [] if source is not None else slot.tokens[:length]
        # Other texts may go on where two have parted, else this one close to its end.
        is_branch = length + KEPT_BEFORE_END < shared < len(tokens)
        is_branch = is_branch or (source is None and 0 < shared == length == self.kv.kept(slot.index))
        self.kv.keep(slot.index, shared if is_branch else max(len(tokens) - KEPT_BEFORE_END, 0))
        return Placement(slot, length, source)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning of two texts."""
    most = min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    return next(at for at in range(most) if first[at] != second[at])
