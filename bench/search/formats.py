"""The value of sets of formats for the search.

    python -m bench.search.formats

Takes a few minutes on two cores.

For each budget of bytes and each set of formats, the knapsack plans the shipped example. Predicted KL (Fisher) prices
the units. The KL of the plan on validation answers is measured, and that of each format in all units. `q0` in a set
lets experts be left out. Prints one JSON object per line.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported

import numpy as np

from moec.compiler.request.objective import byte_weights
from moec.compiler.request.uniform import fits_all, uniform_like
from moec.compiler.search.knapsack import ChoiceTable, least_loss
from moec.compiler.search.pruning import LEFT_OUT, prunable, with_pruning
from moec.compiler.search.space import SearchSpace
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec

from .measured_example import measured_example, silent

EXAMPLES = Path(__file__).parents[2] / "examples"
CALIBRATION_ITEMS, KL_ITEMS = 1_000, 512
BEFORE = "q1g64,q1g128,q2g32,q2g64,q2g128,q3g32,q3g64,q3g128"
SETS = (BEFORE, f"{BEFORE},q1.6g128s", f"{BEFORE},q1.6g64s,q1.6g128s,q1.6s")


class Bench:
    """The example, with predicted KL of every unit in every format of `specs`."""

    def __init__(self, task: str, specs: Sequence[QuantSpec], folder: Path) -> None:
        example = measured_example(str(EXAMPLES / "model"), str(EXAMPLES / "data"), task, CALIBRATION_ITEMS)
        self.plain, self.trials = example.plain, example.trials(folder, KL_ITEMS)
        example.store.prepare(specs, silent)
        self.predicted = example.fisher(specs, Journal(folder, "bench", Disk()))

    def kl_within(self, specs: Sequence[QuantSpec], bits_per_weight: float) -> tuple[float, float] | None:
        """Return bits per weight and measured KL of the plan within the budget, or None if no plan fits."""
        units, kept = tuple(self.plain.units), tuple(spec for spec in specs if not spec.is_pruned)
        costs, losses = (np.full((len(units), len(kept)), np.inf) for _ in range(2))
        for row, unit in enumerate(units):
            rows, columns = self.plain.model.unit_shape(unit.layer, unit.projection)
            for column, spec in enumerate(kept):
                if spec.fits(columns):
                    costs[row, column] = rows * spec.row_bytes(columns)
                    losses[row, column] = self.predicted[(unit, spec)]
        space = SearchSpace(self.plain, units, kept, (), (), ChoiceTable(costs, losses))
        if len(kept) < len(specs):
            known = {key: self.predicted[(UnitKey(*key, "down"), LEFT_OUT)] for key in self.plain.model.expert_keys()}
            weights = byte_weights(self.plain.model, None, reads=False)
            space = with_pruning(space, prunable(known, self.plain.model), weights)
        choice = least_loss(space.size_table(), bits_per_weight * self.plain.expert_weights / 8)
        if choice is None:
            return None
        plan = space.plan(choice)
        return plan.bits_per_weight, self.trials.kl(plan, "bench").mean

    def kl_everywhere(self, spec: QuantSpec) -> tuple[float, float] | None:
        """Return bits per weight and measured KL of one format in all units, or None if it does not fit them."""
        plan = uniform_like(self.plain, spec)
        return (plan.bits_per_weight, self.trials.kl(plan, str(spec)).mean) if fits_all(self.plain, spec) else None


def main() -> None:
    """Read the command line. Print one line per format, and one per set and budget."""
    parser = argparse.ArgumentParser(description="KL that the search finds at equal bytes with sets of formats.")
    parser.add_argument("--task", default="gsm8k")
    parser.add_argument("--bits", default="1.5,1.6,1.7,1.8,1.9,2.0,2.1,2.25,2.4", help="Budgets in bits per weight.")
    parser.add_argument("--sets", default=";".join(SETS), help="Sets of formats, `;` between sets.")
    options = parser.parse_args()
    sets = [[QuantSpec.parse(text) for text in part.split(",")] for part in options.sets.split(";")]
    specs = list(dict.fromkeys(spec for offered in sets for spec in offered))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.task, specs, Path(folder))
        for spec in (spec for spec in specs if not spec.is_pruned):
            print(json.dumps({"everywhere": str(spec), "found": bench.kl_everywhere(spec)}), flush=True)
        for budget in map(float, options.bits.split(",")):
            for offered in sets:
                line = {"bits": budget, "set": ",".join(map(str, offered)), "found": bench.kl_within(offered, budget)}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
