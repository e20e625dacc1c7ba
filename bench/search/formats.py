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

from moec.compiler.request.targets import byte_weights
from moec.compiler.request.uniform import fits_all, uniform_like
from moec.compiler.search.pruning import left_out_losses, with_pruning
from moec.compiler.search.space import build_space
from moec.manifests.quant import QuantSpec

from ..example import Example
from .measured_example import MeasuredExample, measured_example, plan_within

EXAMPLES = Path(__file__).parents[2] / "examples"
CALIBRATION_ITEMS, KL_ITEMS = 1_000, 512
BEFORE = "q1g64,q1g128,q2g32,q2g64,q2g128,q3g32,q3g64,q3g128"
SETS = (BEFORE, f"{BEFORE},q1.6g128s", f"{BEFORE},q1.6g64s,q1.6g128s,q1.6s")


def kl_within(
    measured: MeasuredExample, specs: Sequence[QuantSpec], bits_per_weight: float
) -> tuple[float, float] | None:
    """Return bits per weight and measured KL of the plan within the budget, or None if no plan fits."""
    plain, offered = measured.example.plain, tuple(spec for spec in specs if not spec.is_pruned)
    weights = byte_weights(plain.model, None, reads=False)
    space = build_space(plain, measured.store, measured.prices, weights, offered, (plain.dense,))
    if len(offered) < len(specs):
        losses = left_out_losses(measured.store, measured.prices, measured.popularity)
        space = with_pruning(space, losses, weights)
    plan = plan_within(space, bits_per_weight)
    return None if plan is None else (plan.bits_per_weight, measured.kl(plan))


def kl_everywhere(measured: MeasuredExample, spec: QuantSpec) -> tuple[float, float] | None:
    """Return bits per weight and measured KL of one format in all units, or None if it does not fit them."""
    plain = measured.example.plain
    plan = uniform_like(plain, spec)
    return (plan.bits_per_weight, measured.kl(plan)) if fits_all(plain, spec) else None


def main() -> None:
    """Read the command line. Print one line per format, and one per set and budget."""
    parser = argparse.ArgumentParser(description="KL that the search finds at equal bytes with sets of formats.")
    parser.add_argument("--task", default="gsm8k")
    parser.add_argument("--bits", default="1.5,1.6,1.7,1.8,1.9,2.0,2.1,2.25,2.4", help="Budgets in bits per weight.")
    parser.add_argument("--sets", default=";".join(SETS), help="Sets of formats, `;` between sets.")
    options = parser.parse_args()
    sets = [[QuantSpec.parse(text) for text in names.split(",")] for names in options.sets.split(";")]
    specs = list(dict.fromkeys(spec for offered in sets for spec in offered))
    with tempfile.TemporaryDirectory() as folder:
        example = Example(str(EXAMPLES / "model"), str(EXAMPLES / "data"), options.task)
        measured = measured_example(example, specs, KL_ITEMS, Path(folder) / "work", CALIBRATION_ITEMS)
        for spec in (spec for spec in specs if not spec.is_pruned):
            print(json.dumps({"everywhere": str(spec), "found": kl_everywhere(measured, spec)}), flush=True)
        for budget in map(float, options.bits.split(",")):
            for offered in sets:
                kl = kl_within(measured, offered, budget)
                line = {"bits": budget, "set": ",".join(map(str, offered)), "found": kl}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
