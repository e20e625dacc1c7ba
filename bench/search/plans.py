"""KL of plans at equal bytes.

    python -m bench.search.plans

Takes half an hour on a busy machine. Prints Markdown tables.

The knapsack makes plans of several average bitwidths from three sensitivity tables: output errors times measured gains,
Fisher, and Fisher times the gains that it does not see. The sweep measures the gain of each layer. KL is measured on
512 validation answers of the shipped example. A second table shows plans with formats of 1 bit under Fisher, a third
one uniform formats. Dense weights have 8 bits everywhere.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from moec.compiler.request.plan import CompilePlan
from moec.compiler.request.targets import byte_weights
from moec.compiler.request.uniform import uniform_like
from moec.compiler.search.space import build_space
from moec.compiler.sensitivity.sensitivity import SensitivityTable, probed
from moec.manifests.quant import QuantSpec

from ..example import Example
from .measured_example import MeasuredExample, measured_example, plan_within

KL_ITEMS = 512
FORMATS = (*(QuantSpec(bits, group) for bits in (2, 3, 4) for group in (128, 64, 32)), QuantSpec(8, 128))
SMALL_FORMATS = tuple(QuantSpec(bits, group) for bits in (1, 2, 3) for group in (128, 64))
BITS_PER_WEIGHT = (2.3, 2.4, 2.5, 2.6, 2.8, 3.0)
FEW_BITS_PER_WEIGHT = (1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1, 2.25, 2.4)


class Plans:
    """Plans of one example, and their measured KL."""

    def __init__(self, measured: MeasuredExample) -> None:
        self._measured, self._dense = measured, measured.example.dense(8)
        self._base = replace(measured.example.plain, dense=self._dense)

    def kl_each(self, table: SensitivityTable, specs: Sequence[QuantSpec], bits: Sequence[float]) -> list[float]:
        """Return the KL of the plan of each average bitwidth, nats per token."""
        weights = byte_weights(self._base.model, None, reads=False)
        space = build_space(self._base, self._measured.store, table, weights, specs, (self._dense,))
        plans = []
        for each in bits:
            plan = plan_within(space, each)
            if plan is None:
                raise SystemExit(f"no plan has {each} bits per weight")
            plans.append(self._kl(plan, f"{each} bits"))
        return plans

    def uniform_kl(self, spec: QuantSpec) -> float:
        """Return the KL with every projection in one format, nats per token."""
        return self._kl(uniform_like(self._base, spec), str(spec))

    def _kl(self, plan: CompilePlan, name: str) -> float:
        kl = self._measured.kl(plan)
        print(f"{name}: {kl:.6f}", file=sys.stderr, flush=True)
        return kl


def tables_of(measured: MeasuredExample) -> dict[str, SensitivityTable]:
    """Return the three tables by name."""
    gains, prices = measured.gains, measured.prices
    unseen = [unseen_gain(measured, layer) for layer in range(measured.example.model.num_layers)]
    scaled = {(unit, spec): kl * unseen[unit.layer] for (unit, spec), kl in (prices.predicted or {}).items()}
    return {"gain x error": gains, "Fisher": prices, "Fisher x measured gain": replace(prices, predicted=scaled)}


def unseen_gain(measured: MeasuredExample, layer: int) -> float:
    """Return the measured cost of a layer's experts in their probe formats, over the cost that gradients predict."""
    store, model, costs = measured.store, measured.example.model, np.zeros(2)
    for projection in model.layers[layer].experts.projections:
        units, spec = probed(model, layer, projection, store.specs)
        if spec is not None:
            tables = measured.gains, measured.prices
            costs += [sum(table.unit_loss(store, unit, spec) for unit in units) for table in tables]
    return float(costs[0] / costs[1])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def kl_text(kl: float) -> str:
    """Return KL with three digits, or two significant ones if it is below 0.1."""
    return f"{kl:.{5 if kl < 0.01 else 4 if kl < 0.1 else 3}f}".lstrip("0")


def main() -> None:
    """Read the command line, measure and print the tables."""
    parser = argparse.ArgumentParser(description="KL of plans at equal bytes, by several sensitivity tables.")
    parser.add_argument("--model", default="examples/model")
    parser.add_argument("--data", default="examples/data/gsm8k")
    options = parser.parse_args()
    specs = tuple(dict.fromkeys((*SMALL_FORMATS, *FORMATS)))
    with tempfile.TemporaryDirectory() as folder:
        example = Example(options.model, options.data)
        measured = measured_example(example, specs, KL_ITEMS, Path(folder) / "work")
        tables, plans = tables_of(measured), Plans(measured)
        columns = [plans.kl_each(table, FORMATS, BITS_PER_WEIGHT) for table in tables.values()]
        few = plans.kl_each(tables["Fisher"], SMALL_FORMATS, FEW_BITS_PER_WEIGHT)
        uniform = {str(spec): plans.uniform_kl(spec) for spec in SMALL_FORMATS}
    rows = [[f"{bits}", *(kl_text(kl) for kl in kls)] for bits, *kls in zip(BITS_PER_WEIGHT, *columns, strict=True)]
    print(markdown(["bits per weight", *tables], rows), end="\n\n")
    print(markdown(["bits per weight", *map(str, FEW_BITS_PER_WEIGHT)], [["KL", *map(kl_text, few)]]), end="\n\n")
    print(markdown(["everywhere", *uniform], [["KL", *map(kl_text, uniform.values())]]))


if __name__ == "__main__":
    main()
