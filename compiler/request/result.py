"""What a compile returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moec.evaluation.statistics import LossEstimate

from .plan import CompilePlan


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One loss: the plan that keeps it, None if none on offer does; what it measured on validation items.

    baselines: expert bytes of the best plan of each kind at the same loss, None where none keeps it.
    """

    target: float
    plan: CompilePlan | None
    losses: Mapping[str, LossEstimate]
    kl: float | None
    baselines: Mapping[str, int | None]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        plan = self.plan
        return {
            "target": self.target,
            "expert_packed_bytes": None if plan is None else plan.expert_packed_bytes,
            "dense_packed_bytes": None if plan is None else plan.dense_packed_bytes,
            "bits_per_weight": None if plan is None else plan.bits_per_weight,
            "losses": {task: estimate.to_json() for task, estimate in self.losses.items()},
            "kl": self.kl,
            "baselines": dict(self.baselines),
        }


LossCurve = tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True)
class CompileResult:
    """What came out. path is None after a plan-only run; quality is the content of quality.json; curve: of a sweep."""

    path: Path | None
    plan: CompilePlan
    quality: dict[str, Any]
    curve: LossCurve | None = None
