"""The result of a compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moec.evaluation.statistics import LossEstimate
from moec.manifests.bundle import DeviceSummary

from .plan import CompilePlan


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One loss of a sweep.

    target: the relative loss.
    plan: the plan that keeps it, or None if no plan does.
    losses: losses of the plan on validation items, per task.
    kl: mean KL of the plan on validation items, nats per token.
    baselines: expert bytes of the best plan of each kind at the same loss, None where no plan keeps it.
    """

    target: float
    plan: CompilePlan | None
    losses: Mapping[str, LossEstimate]
    kl: float | None
    baselines: Mapping[str, int | None]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
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
    """The result of a compile.

    path: the bundle, or None after a plan-only run.
    plan: the plan.
    quality: content of quality.json.
    curve: points of a sweep, or None.
    popularity: tokens of each expert, on devices or else in calibration, per layer; or None.
    device: the device entry of the bundle's manifest, or None after a plan-only run.
    """

    path: Path | None
    plan: CompilePlan
    quality: dict[str, Any]
    curve: LossCurve | None = None
    popularity: np.ndarray | None = None
    device: DeviceSummary | None = None
