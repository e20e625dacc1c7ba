"""The loss of answers as a function of the KL, from every plan whose answers were measured.

A KL separates plans well: it uses every token of the same texts. A loss does not: on 2,000 items its standard error is
about a fifth of a target of 2 %. Plans of one search lose about in proportion to their KL. So the search orders plans
by KL, and the losses of all measured plans together decide at which KL the target is used up.
Measured: docs/experiments/2026-11.md, 26: Losses judged by KL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moec.evaluation.statistics import LossEstimate, loss_from_json

from ..quantization.unit_store import UnitStore
from ..request.plan import CompilePlan
from ..sensitivity.acceptance import LEVELS, Level, margin, may_be_kept
from ..sensitivity.trials import Trials

NEAR = math.log(1.5)
"""Distance in log KL at which a measurement counts 0.61 times as much: the loss is a line only nearby."""
REACH = 4.0
"""No KL beyond this factor of a measured one is judged."""
_GRID = 200
LEAST_KL = 1e-9


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """The measurements of one plan.

    kl: mean KL, nats per token.
    losses: relative loss of answers, by task. Tasks after the first that is surely refused are missing.
    """

    kl: float
    losses: Mapping[str, LossEstimate]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"kl": self.kl, "losses": {task: loss.to_json() for task, loss in self.losses.items()}}


class LossByKl:
    """The relation of loss and KL on one model, for one target.

    target: largest relative loss.
    items: number of items in the certificate of each task.
    """

    def __init__(self, target: float, items: Mapping[str, int]) -> None:
        self._target, self._items = target, items
        self.measured: list[MeasuredPlan] = []

    def add(self, plan: MeasuredPlan) -> None:
        """Take one more plan into account. A plan that was known becomes the last one."""
        self.measured = [*(known for known in self.measured if known != plan), plan]

    def loss(self, task: str, kl: float) -> float:
        """Return the expected loss of a task at a KL, nats per token.

        It is a line through the origin, fitted by least squares to the measured losses. The weights are their
        precisions, times a normal curve over the distance in log KL. A line that falls is chance, and counts as 0: a
        plan that differs from the checkpoint does not answer better on other items.
        Measured: docs/experiments/2026-11.md, 28: Losses below zero count as none.
        """
        kls, losses, errors = self._points(task)
        weights = np.exp(-0.5 * (np.log(kls / max(kl, LEAST_KL)) / NEAR) ** 2) / errors**2
        squares = float((weights * kls**2).sum())
        if not squares > 0:  # no measurement is near
            nearest = int(np.argmin(np.abs(np.log(kls / max(kl, LEAST_KL)))))
            return max(0.0, float(losses[nearest] / kls[nearest] * kl))
        return max(0.0, float((weights * kls * losses).sum() / squares * kl))

    def upper_bound(self, task: str, kl: float, level: Level = LEVELS[0]) -> float:
        """Return the bound of the expected loss that is compared with the target.

        The error is that of the nearest measurement, as if it had the most items. Several measurements do not make it
        smaller, because they are made on the same items. Its square falls with the KL, as the number of answers that
        differ does.
        """
        points = self._of(task)
        most = max(loss.n for _, loss in points)
        nearest_kl, nearest = min(points, key=lambda point: abs(math.log(max(point[0], LEAST_KL) / max(kl, LEAST_KL))))
        error = nearest.standard_error * math.sqrt(nearest.n / most * min(1.0, kl / max(nearest_kl, LEAST_KL)))
        return self.loss(task, kl) + margin(error, most, self._items[task], level)

    def bound_of(self, plan: MeasuredPlan, task: str, level: Level = LEVELS[0]) -> float:
        """Return the bound that decides on a measured plan.

        It is that of the expected loss at its KL. The plan's own loss plus one standard error must keep the target too.
        """
        loss = plan.losses[task]
        return max(self.upper_bound(task, plan.kl, level), loss.loss + loss.standard_error)

    def accepts(self, plan: MeasuredPlan) -> bool:
        """Return whether a measured plan keeps the target in every task."""
        return all(task in plan.losses and self.bound_of(plan, task) <= self._target for task in self._items)

    def judge(
        self, trials: Trials, plan: CompilePlan, purpose: str, store: UnitStore | None = None
    ) -> tuple[bool, dict[str, LossEstimate]]:
        """Measure KL and answers of a plan, take it into account, and return whether it is accepted, and its losses.

        purpose: name of the measurement in the log of the trials.
        store: quantized units of the plan. None: those of the trials.
        """
        kl = trials.kl(plan, purpose, store).mean

        def accepts(losses: Mapping[str, LossEstimate]) -> bool:
            measured = MeasuredPlan(kl, losses)
            self.add(measured)
            return self.accepts(measured)

        return trials.judged(plan, self._target, purpose, accepts, store)

    def used_up(self, level: Level = LEVELS[0]) -> float:
        """Return the largest KL at which every task is expected to keep the target, or 0 if none is.

        It is below the KL of every plan whose own loss was refused, and at most REACH times the largest measured KL.
        """
        kls = [max(plan.kl, LEAST_KL) for plan in self.measured]
        refused = [
            kl
            for kl, plan in zip(kls, self.measured, strict=True)
            if not all(may_be_kept(loss, self._target) for loss in plan.losses.values())
        ]
        tasks = [task for task in self._items if self._of(task)]
        grid = np.geomspace(min(kls) / REACH, max(kls) * REACH, _GRID)
        last = 0.0
        for kl in grid.tolist():
            if any(kl >= limit for limit in refused) or any(
                self.upper_bound(task, kl, level) > self._target for task in tasks
            ):
                break
            last = kl
        return last

    def _of(self, task: str) -> list[tuple[float, LossEstimate]]:
        return [(plan.kl, plan.losses[task]) for plan in self.measured if task in plan.losses]

    def _points(self, task: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return KLs, losses and standard errors. An error of 0, of answers that are all equal, is that of one item."""
        points = self._of(task)
        kls = np.maximum([kl for kl, _ in points], LEAST_KL)
        errors = np.maximum([loss.standard_error for _, loss in points], [1 / max(loss.n, 1) for _, loss in points])
        return kls, np.array([loss.loss for _, loss in points]), np.where(np.isfinite(errors), errors, 1.0)


def measured_plans(plain: Sequence[Mapping[str, Any]]) -> list[MeasuredPlan]:
    """Invert MeasuredPlan.to_json."""
    return [
        MeasuredPlan(
            values_of_plan["kl"], {task: loss_from_json(values) for task, values in values_of_plan["losses"].items()}
        )
        for values_of_plan in plain
    ]
