"""G10: a bundle that `moec verify` accepts can run. Random valid bundles of every kind, and changed ones.

Each bundle is verified, opened and run by engines with random options. That happens in child processes with a limit of
address space and of processor time. `MOEC_FULL_GATES=1` takes 500 bundles instead of the few of the fast suite.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moec.manifests.model import ModelSpec
from tests.hostile.bundle_writer import KINDS_OF_WEIGHTS
from tests.hostile.random_bundles import draw_plan
from tests.hostile.random_models import random_model

pytestmark = pytest.mark.gate("G10")

IS_FULL = os.environ.get("MOEC_FULL_GATES") == "1"
FIRST, BUNDLES, BUNDLES_PER_CHILD = 20_000, 500 if IS_FULL else 80, 50 if IS_FULL else 40
ENGINES, CHANGES = (4, 12) if IS_FULL else (3, 5)
PATIENCE_S = 1200
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.in_ci
@pytest.mark.parametrize("first", range(FIRST, FIRST + BUNDLES, BUNDLES_PER_CHILD))
def test_what_is_accepted_runs(first: int) -> None:
    """A run gives tokens, an error that names NaN, or an error about options or memory.

    A changed manifest may also be refused.
    """
    numbers = map(str, (first, BUNDLES_PER_CHILD, ENGINES, CHANGES))
    child = subprocess.run(
        [sys.executable, "-m", "tests.hostile.random_runs", *numbers],
        capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    assert child.returncode == 0, f"{lines[-1:]} ended with {child.returncode}: {child.stderr[-2000:]}"
    done = [line for line in lines if "seed" in line]
    assert [line["seed"] for line in done] == list(range(first, first + BUNDLES_PER_CHILD))
    faults = [f"seed {line['seed']}: {line['fault']}" for line in done if "fault" in line]
    assert not faults, f"{len(faults)} faults, the first:\n{faults[0]}"
    runs, changed = (sum((Counter(line[name]) for line in done), Counter[str]()) for name in ("runs", "changed"))
    assert min(runs["tokens"], runs["NaN"], changed["refused"], changed["tokens"]) > 0, f"{runs}, {changed}"


HAS: dict[str, Callable[[ModelSpec], Any]] = {
    "latent attention": lambda model: any(layer.attention.latent for layer in model.layers),
    "an encoder": lambda model: model.encoder,
    "a relative bias": lambda model: any(layer.attention.relative_bias for layer in model.layers),
    "windows": lambda model: any(layer.attention.sliding_window for layer in model.layers),
    "sinks": lambda model: any(layer.attention.sinks for layer in model.layers),
    "norms of heads": lambda model: any(layer.attention.query_key_norm != "none" for layer in model.layers),
    "biases of attention": lambda model: any(layer.attention.bias != "none" for layer in model.layers),
    "long rotary forms": lambda model: any(
        layer.attention.rope and layer.attention.rope.long for layer in model.layers
    ),
    "groups": lambda model: any(layer.experts.router.groups > 1 for layer in model.layers),
    "corrections": lambda model: any(layer.experts.router.correction for layer in model.layers),
    "sigmoids": lambda model: any(layer.experts.router.scoring == "sigmoid" for layer in model.layers),
    "sparsemixer": lambda model: any(layer.experts.router.scoring == "sparsemixer" for layer in model.layers),
    "static routing": lambda model: any(layer.experts.router.static for layer in model.layers),
    "uniform routing": lambda model: any(layer.experts.router.scoring == "uniform" for layer in model.layers),
    "capacities": lambda model: any(layer.experts.router.capacity for layer in model.layers),
    "router biases": lambda model: any(layer.experts.router.has_bias for layer in model.layers),
    "experts with biases": lambda model: any(layer.experts.has_bias for layer in model.layers),
    "clamped experts": lambda model: any(layer.experts.activation == "clamped_swiglu" for layer in model.layers),
    "experts without a gate": lambda model: any(layer.experts.activation == "relu" for layer in model.layers),
    "shared experts": lambda model: any(layer.shared and layer.experts.count for layer in model.layers),
    "weighed shared experts": lambda model: any(layer.shared and layer.shared.has_gate for layer in model.layers),
    "dense layers": lambda model: any(not layer.experts.count for layer in model.layers),
    "layer norms": lambda model: model.norm == "layer",
    "a head bias": lambda model: model.has_head_bias,
    "tied embeddings": lambda model: model.tie_embeddings,
    "many experts": lambda model: any(layer.experts.count > 32 for layer in model.layers),
}


def test_every_kind_of_model_is_drawn() -> None:
    """The bundles of the fast suite have every kind."""
    models = [random_model(random.Random(seed)) for seed in range(FIRST, FIRST + BUNDLES)]
    assert not [kind for kind, has in HAS.items() if not any(map(has, models))]


def test_every_kind_of_weight_is_drawn() -> None:
    """Every bitwidth, `mxfp4`, experts left out, low versions, and NaN."""
    plans, formats = [draw_plan(seed) for seed in range(FIRST, FIRST + BUNDLES)], set[str]()
    for plan, _ in plans:
        for specs in (plan.dense, *plan.experts.values(), *plan.low.values()):
            formats |= {str(spec).partition("g")[0].rstrip("sb") for spec in specs.values()}
    assert formats == {"bf16", "fp16", "mxfp4", "q0", "q1", "q1.6", "q2", "q3", "q4", "q5", "q6", "q8"}
    assert any(plan.low for plan, _ in plans) and any(plan.tables for plan, _ in plans)
    assert {weights.kind for _, weights in plans} == set(KINDS_OF_WEIGHTS)
