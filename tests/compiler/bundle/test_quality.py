"""quality.json and the model card: equal plans give equal bytes, and every number is the plan's."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moec.cli.terminal.report import comparison_table, heat_map, loss_table, plan_heat_map, verdict_line
from moec.compiler.bundle.certify import TaskCertificate
from moec.compiler.bundle.emit import cost_summary
from moec.compiler.bundle.quality import QUALITY_VERSION, quality_report
from moec.compiler.request.plan import CompilePlan, plain_plan
from moec.compiler.request.targets import Target
from moec.compiler.request.uniform import uniform_like
from moec.compiler.search.baselines import BaselineResult
from moec.compiler.search.comparison import Comparison, can_compare, edgemoe_group_size
from moec.compiler.sensitivity.sensitivity import SensitivityTable, dense_groups
from moec.compiler.sensitivity.trials import Trial
from moec.evaluation.results import EvaluationResult
from moec.evaluation.statistics import DistributionSummary, judge
from moec.manifests.codec import canonical_json
from moec.manifests.model import PROJECTIONS
from moec.manifests.quant import QuantSpec
from tests.compiler.search.toy_search import BF16, SPECS, estimate, toy_model

MODEL = toy_model()
PLAIN = plain_plan(MODEL, BF16, "gptq")
LOSS = Target("loss", 0.02)
DIVERGENCE = DistributionSummary(0.03, 0.001, 0.01, 0.4, 2.0, 0.96, 5000)


def mixed_plan() -> CompilePlan:
    """Return a plan with gate at 2 bits, up at 3, down at 4, and expert 1 of layer 0 at 8."""
    by_projection = dict(zip(PROJECTIONS, (QuantSpec(2, 64), QuantSpec(3, 64), QuantSpec(4, 64)), strict=True))
    units = {u: QuantSpec(8) if u[:2] == (0, 1) else by_projection[u.projection] for u in PLAIN.units}
    return replace(PLAIN, units=units)


def certificate(status: str = "supported") -> TaskCertificate:
    loss = estimate(0.01, 0.002, 4000) if status == "supported" else estimate(0.05, 0.002, 4000)
    results = [
        EvaluationResult(
            "gsm8k", "exact_match", value, 4000, (value - 0.01, value + 0.01), seconds, 99.0 + seconds, 0, "ab" * 32
        )
        for value, seconds in ((0.8, 12.5), (0.792, 31.25))
    ]
    return TaskCertificate(results[0], results[1], loss, judge(loss, 0.02), DIVERGENCE)


def comparison(plan: CompilePlan, uniform: CompilePlan | None) -> Comparison:
    frontier = ((30_000, 0.5), (60_000, 0.02), (90_000, 0.004))
    results = [BaselineResult(name, uniform, frontier) for name in ("best uniform", "published", "ours")]
    return Comparison(plan, 0.03, *results)


def report(plan: CompilePlan | None = None, target: Target = LOSS, **changes: Any) -> dict[str, Any]:
    plan = plan or mixed_plan()
    table = SensitivityTable(np.ones((2, 3)), {group.name: 0.5 for group in dense_groups(MODEL)}, np.full((2, 4), 1.25))
    trial = Trial("search", 55_000, 90_000, 3.3, DIVERGENCE, {"gsm8k": estimate(0.01, 0.002)}, True)
    evidence: dict[str, Any] = {
        "certificates": {"gsm8k": certificate()},
        "comparison": comparison(mixed_plan(), uniform_like(mixed_plan(), QuantSpec(4, 64))),
        "trials": [trial],
        "sensitivity": table,
    }
    return quality_report(plan, target, cost_summary(plan), **{**evidence, **changes})


def test_equal_reports_are_equal_bytes_without_any_time() -> None:
    """Two runs of different speed: `seconds` differ in the results and are not in the report."""
    slower = certificate()
    slower = replace(slower, value=replace(slower.value, seconds=777.0, tokens_per_s=1.0))
    first, second = canonical_json(report()), canonical_json(report(certificates={"gsm8k": slower}))
    assert first == second
    assert b"seconds" not in first and b"tokens_per_s" not in first and b"777" not in first


def test_verdict_task_and_trials_are_there() -> None:
    quality = json.loads(canonical_json(report()))
    assert (quality["version"], quality["verdict"]) == (QUALITY_VERSION, "supported")
    assert quality["target"] == {"kind": "loss", "value": 0.02}
    task = quality["tasks"]["gsm8k"]
    assert (task["metric"], task["baseline"], task["value"], task["n"]) == ("exact_match", 0.8, 0.792, 4000)
    assert task["verdict"]["status"] == "supported" and task["loss"]["upper95"] <= 0.02
    assert (task["kl"]["mean"], task["kl"]["q99"], task["kl"]["agreement"]) == (0.03, 0.4, 0.96)
    assert quality["trials"][0]["accepted"] is True and quality["trials"][0]["losses"]["gsm8k"]["loss"] == 0.01


def test_sizes_and_bits_are_the_plans() -> None:
    plan, quality = mixed_plan(), report()
    sizes = quality["sizes"]
    assert sizes["expert_packed_bytes"] == plan.expert_packed_bytes
    assert sizes["expert_16bit_bytes"] == PLAIN.expert_packed_bytes
    assert sizes["expert_share_of_16bit"] == pytest.approx(plan.expert_packed_bytes / PLAIN.expert_packed_bytes)
    units = quality["bits"]["units"]
    for unit in plan.units:
        columns = MODEL.unit_shape(unit.layer, unit.projection)[1]
        assert units[unit.projection][unit.layer][unit.expert] == plan.units[unit].bits_per_weight(columns)
    assert quality["bits"]["formats"] == {"q2g64": 7, "q3g64": 7, "q4g64": 7, "q8": 3}


def test_gains_are_shares_of_the_baselines_bytes() -> None:
    plan = mixed_plan()
    uniform = uniform_like(plan, QuantSpec(4, 64))
    row = comparison(plan, uniform).to_json()["baselines"][0]  # type: ignore[index]
    assert row["gain_at_target"] == pytest.approx(1 - plan.expert_packed_bytes / uniform.expert_packed_bytes)
    assert row["gain_at_equal_kl"] == pytest.approx(1 - plan.expert_packed_bytes / row["bytes_at_equal_kl"])
    absent = comparison(plan, None).to_json()["baselines"][0]  # type: ignore[index]
    assert (absent["expert_packed_bytes"], absent["gain_at_target"]) == (None, None)


def test_edgemoe_gets_a_group_size_that_fits() -> None:
    """With 96 columns, only the formats with groups of 32 fit all projections."""
    plan = plain_plan(toy_model(width=96), BF16, "gptq")
    none = BaselineResult("best uniform", None, ())
    at_16 = BaselineResult("best uniform", plan, ())
    at_3 = BaselineResult("best uniform", uniform_like(plan, QuantSpec(3, 32)), ())
    wide = (QuantSpec(2, 64), QuantSpec(4, 64), BF16)
    for result in (none, at_16, at_3):
        assert edgemoe_group_size(plan, result, (*wide, QuantSpec(2, 32))) == 32
    assert edgemoe_group_size(plan, none, wide) == 0
    assert can_compare(plan, SPECS) and not can_compare(plan, (BF16,))
    assert not can_compare(plain_plan(toy_model(width=100), BF16, "gptq"), SPECS)


def test_the_report_in_a_terminal() -> None:
    quality = report()
    lines = plan_heat_map(quality).splitlines()
    assert lines[1] == "layer   0  234 888 234 234" and lines[2] == "layer   1  234 234 234 234"
    assert "q2g64 x7" in lines[-1]
    quality["bits"]["units"]["up"][0][0] = 1.6875  # three values and a scale per row
    assert plan_heat_map(quality).splitlines()[1].startswith("layer   0  2t4 888")
    for bits in quality["bits"]["units"].values():
        bits[0], bits[1] = [1.0, 16.0] * 32, []
    wide = plan_heat_map(quality).splitlines()
    assert wide[0] == "bits per layer and expert (▁ 1, █ 16)"
    assert wide[1] == f"layer 0  {'▁█' * 32}  8.50" and wide[2] == "layer 1  no routed experts"
    assert max(map(len, wide)) < 110 and "q2g64 x7" in wide[-1]
    table = loss_table(quality)
    assert "1.00 %" in table and "96.00%" in table and "supported" in table
    assert "this bundle" in comparison_table(quality) and "best uniform" in comparison_table(quality)
    assert verdict_line(quality).startswith("supported")


def test_a_report_without_loss_data_or_search() -> None:
    nothing: dict[str, Any] = {"certificates": {}, "comparison": None, "trials": [], "sensitivity": None}
    quality = report(target=Target("uniform", 4), **nothing)
    assert quality["verdict"] == "not measured" and quality["comparison"] is None
    assert loss_table(quality) == "" and "16 bits" in comparison_table(quality)
    quality["sizes"]["expert_bits_per_weight"] = 4.5
    assert "4.500 (4 and scales)" in comparison_table(quality)
    quality["sizes"]["expert_bits_per_weight"] = 4.0
    assert "scales" not in comparison_table(quality)
    zero = replace(certificate(), loss=None, verdict=None)
    assert " - " in loss_table(report(target=Target("kl", 0.05), certificates={"gsm8k": zero}))


def test_experts_left_out_are_said() -> None:
    assert "left out" not in plan_heat_map(report())
    out = {unit: QuantSpec(0) for unit in PLAIN.units if unit[:2] in ((0, 2), (1, 3))}
    plan = replace(mixed_plan(), units={**mixed_plan().units, **out})
    lines = plan_heat_map(report(plan=plan)).splitlines()
    assert lines[1] == "layer   0  234 888 000 234" and "q0 x6" in lines[-2]
    assert lines[0] == "whole bits of gate, up and down for each expert (0 = left out)"
    assert lines[-1] == "left out   2 of 8 experts (`--keep-experts` keeps all)"


def test_the_map_shows_experts_left_out() -> None:
    lines = heat_map([[0.0, 2.0, 16.0], [1.0, 1.0, 1.0]]).splitlines()
    assert lines[0] == "bits per layer and expert (▁ 1, █ 16, · left out)"
    assert lines[1] == "layer 0  ·▃█  6.00" and lines[2] == "layer 1  ▁▁▁  1.00"
    merged = heat_map([[0.0] * 64 + [4.0] * 64]).splitlines()
    assert merged[0].endswith("(▁ 1, █ 16, · left out; a block is 2 experts)")
    assert merged[1] == f"layer 0  {'·' * 32}{'▅' * 32}  2.00"
