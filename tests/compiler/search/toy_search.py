"""A search without a checkpoint: a model with shapes only, units with given errors, trials with given results."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np

from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.request.plan import CompilePlan, plain_plan
from moec.compiler.request.targets import ByteWeights
from moec.compiler.search.space import SearchSpace, build_space
from moec.compiler.sensitivity.acceptance import LEVELS, Level, keeps, kl_bound
from moec.compiler.sensitivity.sensitivity import SensitivityTable, dense_formats, dense_groups
from moec.compiler.sensitivity.trials import Trials
from moec.evaluation.statistics import DistributionSummary, LossEstimate
from moec.manifests.model import AttentionSpec, ExpertsSpec, LayerSpec, ModelSpec, RopeSpec, RouterSpec, UnitKey
from moec.manifests.quant import QuantSpec

BF16 = QuantSpec(16, float_type="bfloat16")
SPECS = (*(QuantSpec.parse(text) for text in ("q2g64", "q2g32", "q3g64", "q3g32", "q4g64", "q4g32", "q8")), BF16)
ITEMS = 2000


def toy_model(layers: int = 2, experts: int = 4, hidden: int = 64, width: int = 128, vocab: int = 320) -> ModelSpec:
    """Return a model with shapes only. Two heads, top-2."""
    attention = AttentionSpec(2, 1, 32, RopeSpec(10_000.0, 32))
    routed = ExpertsSpec(experts, min(2, experts), width, "silu", RouterSpec("softmax", True))
    return ModelSpec("mixtral", hidden, vocab, 128, 1e-5, False, (LayerSpec(attention, routed),) * layers, (2,))


class ToyStore:
    """Replacement of a UnitStore. Errors fall by a factor of 4 per bit, and depend on unit and group size."""

    quantizer = "gptq"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def holds(self, unit: UnitKey, spec: QuantSpec) -> bool:
        return True

    def held_by_all(self, specs: Sequence[QuantSpec]) -> list[QuantSpec]:
        return list(specs)

    def error(self, unit: UnitKey, spec: QuantSpec) -> float:
        return self._error(str(unit), spec)

    def dense_error(self, name: str, spec: QuantSpec) -> float:
        return 0.2 * self._error(name, spec)

    def _error(self, name: str, spec: QuantSpec) -> float:
        if spec.bitwidth == 16:
            return 0.0
        return 10 ** (2 * uniform_number(f"{self._seed} {name}")) * 4.0**-spec.bitwidth * (1 + spec.group_size / 512)


def uniform_number(text: str) -> float:
    """Return a number from 0 to 1 that depends only on the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def toy_space(
    model: ModelSpec | None = None,
    weights: ByteWeights | None = None,
    specs: tuple[QuantSpec, ...] = SPECS,
    dense_widths: tuple[int, ...] = (4, 8, 16),
    seed: int = 0,
) -> SearchSpace:
    """Return the priced table of a toy model. With its gains, all units at 2 bits predict a KL of about 1."""
    model = model or toy_model()
    plain = plain_plan(model, BF16, "gptq")
    layers, experts = model.num_layers, model.layers[0].experts.count
    gain = 1.0 / (layers * experts * 3)
    table = SensitivityTable(
        np.full((layers, 3), gain), {group.name: gain for group in dense_groups(model)}, np.ones((layers, experts))
    )
    dense = dense_formats(plain, dense_widths, 64, "bfloat16")
    store = cast(UnitStore, ToyStore(seed))
    return build_space(plain, store, table, weights or ByteWeights(np.ones((layers, experts)), 1.0), specs, dense)


def totals(space: SearchSpace, plan: CompilePlan) -> tuple[float, float]:
    """Return the sums that the knapsack uses: the cost and the predicted loss."""
    rows = [space.unit_specs.index(plan.units[unit]) for unit in space.units]
    for group in space.groups:
        wanted = plan.dense[group.tensors[0]]
        rows.append(next(i for i, option in enumerate(space.dense_options) if option[group.tensors[0]] == wanted))
    return space.table.totals(np.array(rows))


def predicted_loss(space: SearchSpace, plan: CompilePlan) -> float:
    return totals(space, plan)[1]


class ToyTrials:
    """Replacement of Trials. The KL is a function of the plan. The relative loss is `slope` times the KL.

    generated: plans whose answers were generated.
    measured: plans whose KL was measured.
    """

    has_data = True
    first_kl_per_loss = 1.0
    held_out_texts = (500,)
    available_items: ClassVar[dict[str, tuple[int, int]]] = {"toy": (ITEMS, ITEMS)}

    def __init__(
        self, kl_of: Callable[[CompilePlan], float], slope: float = 1.0, standard_error: float = 0.001
    ) -> None:
        self._kl_of, self._slope, self._standard_error = kl_of, slope, standard_error
        self.certification_items = {"toy": ITEMS}
        self.measured: list[CompilePlan] = []
        self.generated: list[CompilePlan] = []

    def kl(self, plan: CompilePlan, purpose: str, store: Any = None) -> DistributionSummary:
        self.measured.append(plan)
        mean = self._kl_of(plan)
        return DistributionSummary(mean, mean / 50, mean, mean * 5, mean * 9, math.exp(-mean), 1000)

    def kl_bound(self, summary: DistributionSummary, level: Level = LEVELS[0]) -> float:
        return kl_bound(summary, [(256, 500)], level)

    def kl_each(
        self, plans: Sequence[CompilePlan], purposes: Sequence[str], store: Any = None
    ) -> list[DistributionSummary]:
        return [self.kl(plan, purpose, store) for plan, purpose in zip(plans, purposes, strict=True)]

    def accepts(
        self, plan: CompilePlan, target: float, purpose: str, store: Any = None
    ) -> tuple[bool, dict[str, LossEstimate]]:
        losses = self.losses_of(plan)
        return keeps(losses["toy"], target, self.certification_items["toy"]), losses

    def losses_of(self, plan: CompilePlan) -> dict[str, LossEstimate]:
        """Return the measured losses of a plan that answers."""
        self.generated.append(plan)
        return {"toy": estimate(self._slope * self._kl_of(plan), self._standard_error)}

    def judged(
        self,
        plan: CompilePlan,
        target: float,
        purpose: str,
        accepts: Callable[[Mapping[str, LossEstimate]], bool],
        store: Any = None,
    ) -> tuple[bool, dict[str, LossEstimate]]:
        losses = self.losses_of(plan)
        return accepts(losses), losses

    def as_trials(self) -> Trials:
        """Return this object as Trials."""
        return cast(Trials, self)


def noisy_kl(
    space: SearchSpace, noise: float = 0.04, scale: float = 1.7, power: float = 0.9
) -> Callable[[CompilePlan], float]:
    """Return a KL that rises with a power of the predicted loss, with noise."""

    def kl_of(plan: CompilePlan) -> float:
        wobble = 1 + noise * (2 * uniform_number(plan.digest) - 1)
        return float(scale * predicted_loss(space, plan) ** power * wobble)

    return kl_of


def estimate(loss: float, standard_error: float, n: int = ITEMS, baseline: float = 0.8) -> LossEstimate:
    """Return a normal estimate of that loss on n items."""
    low, high = loss - 1.96 * standard_error, loss + 1.96 * standard_error
    one_sided = 1.645 * standard_error
    return LossEstimate(
        baseline, baseline * (1 - loss), loss, (low, high), loss - one_sided, loss + one_sided, standard_error, n,
        1 / baseline,
    )  # fmt: skip
