"""Measure plans with one format for all experts, and for each layer and projection, next to rows of equal_bytes."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from bench.equal_bytes.__main__ import BITS, planned_weights
from bench.equal_bytes.our_plans import OurPlans
from bench.equal_bytes.rows import Rows
from bench.example import Example
from bench.search.grouped_space import by_layer_and_projection

MODEL, DATA, TASK = "build/example-smollm2/model", "build/example-smollm2/data/prose", "perplexity"
FOLDER = Path(sys.argv[1])

plans = OurPlans(MODEL, DATA, TASK, FOLDER / "work", BITS, 0)
rows = Rows(Example(MODEL, DATA, TASK), FOLDER, 60)
chosen = {f"uniform-{name}": plan for name, plan in plans.uniform().items()}
wanted = [f"uniform-{name}" for name in ("q3g64b", "q4g64b", "q3g32b", "q4g32b", "q5g64b", "q2g32b")]
for size in (21_876_480, 25_300_000):
    plan = plans.grouped(size, by_layer_and_projection)
    if plan is not None:
        chosen[f"layers-{size}"] = plan
        wanted.append(f"layers-{size}")
for name in wanted:
    row = rows.row(name, lambda plan=chosen[name]: (planned_weights(plan, plans.store), plan.expert_packed_bytes))
    print(name, *rows.figures(row), flush=True)
