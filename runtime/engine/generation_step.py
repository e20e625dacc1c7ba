"""One token of a generation, as `Engine.generate` yields it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..expert_cache.cache_stats import CacheStats

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GenerationStep:
    """One emitted token.

    text: text that can be shown now; may be empty.
    position: position of the token in the sequence.
    elapsed_ns: time since the step before. For the first step it includes prefill.
    cache: counts of the expert cache for this token.
    finish_reason: set on the last step.
    reused_tokens: tokens of the prompt that were not computed, as a slot had their keys and values.
    """

    token_id: int
    text: str
    position: int
    elapsed_ns: int
    cache: CacheStats
    finish_reason: FinishReason | None
    reused_tokens: int = 0
