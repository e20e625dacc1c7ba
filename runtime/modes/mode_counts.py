"""ModeCounts: what the lossy modes of one engine have decided so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

FLAT_SHARE = 1 / 3
"""A router is flat if the lower-ranked half of a token's experts has more than this share of the weight.

Then leaving out or replacing an expert costs more than its rank suggests. Equal weights have a share of 0.5.
"""


@dataclass(slots=True)
class ModeCounts:
    """Decisions of the modes so far.

    ranks: experts that decode passes chose, over all tokens and layers.
    missed: chosen experts that the logical cache lacked, if a mode reads it.

    replaced, dropped: chosen experts that cache routing replaced or dropped.

    low, skipped: chosen experts that dynamic precision computed as low version or skipped. `low` includes experts whose
        low version was already cached.

    tokens: decoded tokens.
    fallback_tokens: tokens computed again with all experts.

    foretold: experts that a discarded pass had chosen for a pass computed again.
    foretold_right: foretold experts that were chosen again.

    prompt_experts: experts that passes over prompts chose, each once per pass and layer, if a mode decides there.

    prompt_missed: those that the logical cache lacked.
    prompt_low, prompt_skipped: those that dynamic precision computed as low version or skipped.

    routings: tokens x layers.
    lower_half: sum over routings of the weight share of the lower-ranked half of the experts.
    """

    ranks: int = 0
    missed: int = 0
    replaced: int = 0
    dropped: int = 0
    low: int = 0
    skipped: int = 0
    tokens: int = 0
    fallback_tokens: int = 0
    foretold: int = 0
    foretold_right: int = 0
    prompt_experts: int = 0
    prompt_missed: int = 0
    prompt_low: int = 0
    prompt_skipped: int = 0
    routings: int = 0
    lower_half: float = 0.0

    def count_weights(self, weights: np.ndarray) -> None:
        """Add the weights [T, K] of a router."""
        ranked, total = np.sort(weights, axis=1), weights.sum(axis=1)
        self.routings += len(weights)
        self.lower_half += float((ranked[:, : weights.shape[1] // 2].sum(axis=1) / np.maximum(total, 1e-20)).sum())

    def add(self, others: Sequence[int | float]) -> None:
        """Add the counts of a pass of the extension: those of PASS_COUNTS, in this order."""
        for name, count in zip(PASS_COUNTS, others, strict=True):
            setattr(self, name, getattr(self, name) + count)

    def to_plain(self) -> dict[str, int | float | None]:
        """Return the counts and their shares for `--json`."""
        plain: dict[str, int | float | None] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("missed", "replaced", "dropped", "low", "skipped"):
            plain[f"{name}_share"] = getattr(self, name) / self.ranks if self.ranks else None
        for name in ("prompt_missed", "prompt_low", "prompt_skipped"):
            plain[f"{name}_share"] = getattr(self, name) / self.prompt_experts if self.prompt_experts else None
        plain["lower_half_share"] = self.lower_half / self.routings if self.routings else None
        plain["fallback_share"] = self.fallback_tokens / self.tokens if self.tokens else None
        plain["foretold_right_share"] = self.foretold_right / self.foretold if self.foretold else None
        return plain


PASS_COUNTS = tuple(field.name for field in fields(ModeCounts) if field.name not in ("tokens", "fallback_tokens"))
"""Counts of a pass, in the order of `LossyCounts` of the extension. The decoder counts the others."""
