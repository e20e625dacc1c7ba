"""KL of plans at equal bytes.

    python -m bench.search.plans

Takes half an hour on a busy machine. Prints Markdown tables.

The knapsack makes plans of several average bitwidths from three sensitivity tables: output errors times measured gains,
Fisher, and Fisher times the gains that it does not see. KL is measured on 512 validation answers of the shipped
example. A second table shows plans with formats of 1 bit under Fisher, a third one uniform formats. Dense weights have
8 bits everywhere.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from moec.compiler.request.objective import byte_weights
from moec.compiler.request.plan import CompilePlan
from moec.compiler.request.targets import Target
from moec.compiler.search.bisect import search
from moec.compiler.search.space import build_space
from moec.compiler.sensitivity.sensitivity import SensitivityTable, dense_groups, measure_gains, predicted_gains
from moec.compiler.sensitivity.trials import Trials
from moec.manifests.model import PROJECTIONS, UnitKey
from moec.manifests.quant import QuantSpec

from .measured_example import MeasuredExample, measured_example, silent

KL_ITEMS, GAIN_ITEMS = 512, 256
FORMATS = (*(QuantSpec(bits, group) for bits in (2, 3, 4) for group in (128, 64, 32)), QuantSpec(8, 128))
SMALL_FORMATS = tuple(QuantSpec(bits, group) for bits in (1, 2, 3) for group in (128, 64))
BITS_PER_WEIGHT = (2.3, 2.4, 2.5, 2.6, 2.8, 3.0)
FEW_BITS_PER_WEIGHT = (1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1, 2.25, 2.4)
Predicted = Mapping[tuple[UnitKey, QuantSpec], float]


class Plans:
    """Plans of one example, and their measured KL."""

    def __init__(self, example: MeasuredExample, work: Path) -> None:
        self._example, self._trials = example, example.trials(work / "plans", KL_ITEMS)
        self._dense = example.dense(8)
        self._base = replace(example.plain, dense=self._dense)

    def kl_each(self, table: SensitivityTable, specs: Sequence[QuantSpec], bits: Sequence[float]) -> list[float]:
        """Return the KL of the plan of each average bitwidth, nats per token."""
        weights = byte_weights(self._base.model, None, reads=False)
        space = build_space(self._base, self._example.store, table, weights, specs, (self._dense,))
        found = []
        for each in bits:
            plan = search(space, self._trials, Target("bits_per_weight", each), lambda note: None)
            found.append(self._kl(plan, f"{each} bits"))
        return found

    def uniform_kl(self, spec: QuantSpec) -> float:
        """Return the KL with every projection in one format, nats per token."""
        return self._kl(replace(self._base, units=dict.fromkeys(self._base.units, spec)), str(spec))

    def _kl(self, plan: CompilePlan, name: str) -> float:
        """Return the KL of a plan. The journal has it already if the search measured it."""
        found = self._trials.kl(plan, name).mean
        print(f"{name}: {found:.6f}", file=sys.stderr, flush=True)
        return found


def tables_of(example: MeasuredExample, gain_trials: Trials, predicted: Predicted) -> dict[str, SensitivityTable]:
    """Return the three tables by name. Dense weights cost nothing, because they are the same in all plans."""
    plain, store = example.plain, example.store
    dense = {group.name: 0.0 for group in dense_groups(plain.model)}
    ones = np.ones((plain.model.num_layers, max(layer.experts.count for layer in plain.model.layers)))
    measured = measure_gains(gain_trials, plain, FORMATS, silent)
    unseen = measured / predicted_gains(plain, store, FORMATS, predicted)
    scaled = {
        (unit, spec): kl * float(unseen[unit.layer, PROJECTIONS.index(unit.projection)])
        for (unit, spec), kl in predicted.items()
    }
    return {
        "gain x error": SensitivityTable(measured, dense, ones),
        "Fisher": SensitivityTable(measured, dense, ones, predicted),
        "Fisher x measured gain": SensitivityTable(measured, dense, ones, scaled),
    }


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
    example = measured_example(options.model, options.data)
    specs = tuple(dict.fromkeys((*SMALL_FORMATS, *FORMATS)))
    example.store.prepare(specs, silent)
    with tempfile.TemporaryDirectory() as folder:
        gain_trials = example.trials(Path(folder) / "gains", GAIN_ITEMS)
        tables = tables_of(example, gain_trials, example.fisher(specs, gain_trials.journal))
        plans = Plans(example, Path(folder))
        columns = [plans.kl_each(table, FORMATS, BITS_PER_WEIGHT) for table in tables.values()]
        few = plans.kl_each(tables["Fisher"], SMALL_FORMATS, FEW_BITS_PER_WEIGHT)
        uniform = {str(spec): plans.uniform_kl(spec) for spec in SMALL_FORMATS}
    rows = [[f"{bits}", *(kl_text(kl) for kl in kls)] for bits, *kls in zip(BITS_PER_WEIGHT, *columns, strict=True)]
    print(markdown(["bits per weight", *tables], rows), end="\n\n")
    print(markdown(["bits per weight", *map(str, FEW_BITS_PER_WEIGHT)], [["KL", *map(kl_text, few)]]), end="\n\n")
    print(markdown(["everywhere", *uniform], [["KL", *map(kl_text, uniform.values())]]))


if __name__ == "__main__":
    main()
