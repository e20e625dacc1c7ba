"""A sweep: the fewest bytes at every loss. Each plan and baseline is measured."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moec.compiler.request.plan import CompileResult, CurvePoint, LossCurve
from moec.compiler.search.knapsack import least_cost
from moec.compiler.search.loss_curve import PER_LAYER, per_layer_space
from moec.reporting.card import sweep_svg
from moec.reporting.curves import curves_of_sweep
from tests.compiler.search.toy_search import toy_space
from tests.tiny_compile import compile_tiny, save_model, save_texts

LOSSES = (0.05, 0.3, 0.8)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> CompileResult:
    root = tmp_path_factory.mktemp("curve")
    return compile_tiny(
        save_model(root / "model"), root / "out", "loss", LOSSES[-1], data=str(save_texts(root / "texts")),
        tasks=("perplexity",), plan_only=True, sweep=LOSSES, comparisons=True, dense_bits=16,
    )  # fmt: skip


def curve_of(result: CompileResult) -> LossCurve:
    assert result.path is None and result.curve is not None
    return result.curve


def test_every_loss_has_a_plan_that_keeps_it_and_more_loss_takes_no_more_bytes(result: CompileResult) -> None:
    curve = curve_of(result)
    assert [point.target for point in curve] == list(LOSSES)
    sizes = []
    for point in curve:
        assert point.plan is not None and point.kl is not None
        assert all(estimate.loss <= point.target for estimate in point.losses.values())
        sizes.append(point.plan.expert_packed_bytes)
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_baselines_stand_beside_every_plan(result: CompileResult) -> None:
    for point in curve_of(result):
        assert set(point.baselines) == {"best uniform", "EdgeMoE with our quantizer", "EdgeMoE as published", PER_LAYER}
        # Published EdgeMoE has other formats.
        found = [size for name, size in point.baselines.items() if size is not None and "published" not in name]
        assert found and point.plan is not None
        # A plan with a format per unit needs at most the bytes of a plan with a format per layer. In a random model,
        # any change of weights may change the perplexity by 5 %.
        assert point.target < 0.1 or point.plan.expert_packed_bytes <= min(found)


def test_a_layer_takes_one_format(result: CompileResult) -> None:
    space = toy_space()
    plan = space.plan(least_cost(space.table, 0.0))
    layered = per_layer_space(space, plan)
    chosen = layered.plan(np.zeros(len(space.plain.model.expert_layers), np.int64))
    for layer in space.plain.model.expert_layers:
        assert len({spec for unit, spec in chosen.units.items() if unit.layer == layer}) == 1
    assert chosen.dense == plan.dense
    totals = layered.table.totals(np.zeros(len(layered.table.costs), np.int64))
    rows = len(space.units)
    assert totals[0] == pytest.approx(float(space.table.costs[:rows, 0].sum()))
    assert totals[1] == pytest.approx(float(space.table.losses[:rows, 0].sum()))


def test_the_picture_and_the_plain_form(result: CompileResult) -> None:
    plain = [point.to_json() for point in curve_of(result)]
    assert json.loads(json.dumps(plain)) == plain
    nothing = CurvePoint(0.001, None, {}, None, {}).to_json()
    assert nothing["expert_packed_bytes"] is None
    assert sweep_svg("x", curves_of_sweep([nothing, *plain])).count("<circle") > 0
