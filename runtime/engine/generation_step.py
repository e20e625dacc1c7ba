"""One token of a generation, as `Engine.generate` yields it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..expert_cache.counts import CacheStats

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GenerationStep:
    """One emitted token.

    text: what can be shown now, may be empty. position: of the token in the sequence. elapsed_ns: since the step
    before (the first includes prefill). cache: what the expert cache did for this token. finish_reason: on the last.
    """

    token_id: int
    text: str
    position: int
    elapsed_ns: int
    cache: CacheStats
    finish_reason: FinishReason | None
