"""Arguments of attention that belong together: the places of tokens in the cache, and the rule that weighs positions.

Shape letters: T tokens, H heads, S slots, C cache positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from .packed_matrix import Floats, Int32s


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """Slots and positions of the T tokens of a pass.

    slots: int32 [T], below S.
    positions: int32 [T], below C.
    ends: for an encoder, end of each token's sequence, int32 [T], 1 to C. A token sees positions 0 to end - 1.
    None: a token sees the positions up to its own.
    """

    slots: Int32s
    positions: Int32s
    ends: Int32s | None = None


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """The rule that turns products of queries and keys into weights of positions.

    scale: factor of every score.
    window: 0 for none, else its size. A token at position p sees positions max(0, p - window + 1) to p.
    It must be 0 if the tokens have `ends`.
    sinks: float32 [H], an additional score of each head. It takes a share of the softmax and adds no value.
    bias: float32 [H, 2 C - 1]. For a token at position p, the entry C - 1 + j - p is added to the scaled score of
    position j.
    """

    scale: float
    window: int = 0
    sinks: Floats | None = None
    bias: Floats | None = None
