"""What bench compares: strategies on an accelerator, grouped search spaces, and shares of lossy decisions."""

from __future__ import annotations

import itertools
import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.accelerator import compile as compile_on_gpu
from bench.accelerator.measured import ARMS, DENSE_HERE, run, table, tokens_of
from bench.search.gain import GROUPINGS, MATRIX
from bench.search.grouped_space import grouped, with_formats
from bench.search.measured_model import plan_of_size
from bench.yardstick.throttled.replayed import Shares
from moec.compiler.request.plan import CompilePlan
from moec.compiler.search.space import SearchSpace
from moec.runtime import load
from tests.compiler.search.toy_search import predicted_loss, toy_space

BITS = (2.6, 3.5, 5.0)


def plan_of(space: SearchSpace, bits: float) -> CompilePlan:
    plan = plan_of_size(space, bits * space.plain.expert_weights / 8)
    assert plan is not None
    assert plan.bits_per_weight <= bits
    return plan


@pytest.mark.parametrize(("kind", "bits"), list(itertools.product(GROUPINGS, BITS)))
def test_a_group_has_one_format(kind: str, bits: float) -> None:
    space, group_of = toy_space(), GROUPINGS[kind]
    formats: dict[object, set[str]] = {}
    for unit, spec in plan_of(grouped(space, group_of), bits).units.items():
        formats.setdefault(group_of(unit), set()).add(str(spec))
    assert {len(found) for found in formats.values()} == {1}


@pytest.mark.parametrize("bits", BITS)
def test_groups_of_one_matrix_change_no_plan(bits: float) -> None:
    space = toy_space()
    assert plan_of(grouped(space, GROUPINGS[MATRIX]), bits).units == plan_of(space, bits).units


@pytest.mark.parametrize("bits", BITS)
def test_finer_groups_lose_less(bits: float) -> None:
    space = toy_space()
    losses = [predicted_loss(space, plan_of(grouped(space, GROUPINGS[kind]), bits)) for kind in ("all experts", MATRIX)]
    assert losses[1] < losses[0]


def test_corrected_predictions_reach_the_groups() -> None:
    space = toy_space()
    factors = np.linspace(1, 2, space.num_factors)
    groups = grouped(space, GROUPINGS["each layer"])
    assert groups.num_factors == space.num_factors
    expected = grouped(space.rescaled(factors), GROUPINGS["each layer"])
    assert np.array_equal(groups.rescaled(factors).table.losses, expected.table.losses)


@pytest.mark.parametrize("bits", BITS)
def test_formats_that_are_not_offered_are_in_no_plan(bits: float) -> None:
    space = toy_space()
    part = with_formats(space, lambda column: space.unit_specs[column].bitwidth in (2, 4, 16))
    assert {spec.bitwidth for spec in plan_of(part, bits).units.values()} <= {2, 4, 16}
    assert 3 in {spec.bitwidth for spec in plan_of(space, 3.5).units.values()}


SHIPPED = Path(__file__).parents[2] / "examples" / "bundle"


def test_each_strategy_has_its_own_rule_and_counts(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Anna has 3 apples and buys 4. ", encoding="utf-8")
    options = Namespace(prompts=[4], beams=[2], tokens=2, rounds=1)
    asked = {"accelerator": "torch-cpu", "accelerator_memory": "18MiB", "accelerator_dense": "device"}
    with load(SHIPPED, expert_cache="100%", context=40, slots=2, threads=1, **asked) as engine:
        rows = run(engine, tokens_of(engine, text, 40), options)
        assert engine.accelerator is engine.model.accelerator is not None
        on_device = len(engine.accelerator.placement.resident)
    experts = {row["strategy"]: row["experts"] for row in rows}
    assert list(experts) == list(ARMS)
    assert 0 < on_device < 48
    assert experts["CPU only"] == {"resident": 0, "copied": 0, "cpu": 0, "copied_bytes": 0}
    for name, idle in (("copy only", "cpu"), ("static placement", "copied")):
        assert experts[name][idle] == 0
        assert all(experts[name][place] for place in {"resident", "copied", "cpu"} - {idle})
    assert sum(experts[DENSE_HERE][place] for place in ("resident", "copied", "cpu")) > 0
    assert len(table(rows).splitlines()) == 2 + len(ARMS)


@pytest.mark.slow
def test_a_compile_on_a_gpu_is_rehearsed_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every stage of torch counts products of its device. Other products are named, and end in status 1."""
    monkeypatch.setattr(sys, "argv", ["compile.py", "--torch-device", "cpu"])
    assert compile_on_gpu.main() == 0
    first, *stages, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["command"] == "compile.py --torch-device cpu" and first["machine"]["device"] == "cpu"
    products = {row["stage"]: row["flop"] for row in stages}
    for stage in (
        "calibrating and quantizing",
        "predicting what each unit costs",
        "measuring plans by their KL",
        "KL on perplexity",
    ):
        assert products[stage].keys() == {"cpu"} and products[stage]["cpu"] > 1e6
    assert last["verdict"] in ("supported", "met", "missed") and last["not on the device"] == []
    assert compile_on_gpu.elsewhere({"a": {"cpu": 2, "cuda": 98}, "b": {"cuda": 100}}, "cuda") == ["a"]


def test_without_a_gpu_no_compile_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["compile.py"])
    assert compile_on_gpu.main() == 0 and capsys.readouterr().out == "not run\n"


def test_shares_of_answers_and_of_prompts_are_over_their_own_missed_experts() -> None:
    answers = {"missed": 200, "low": 80, "skipped": 40, "replaced": 20, "dropped": 10}
    prompts = {"prompt_missed": 50, "prompt_low": 25, "prompt_skipped": 5}
    found = Shares.of_counts({**answers, **prompts, "tokens": 30, "fallback_tokens": 6})
    assert found == Shares(0.4, 0.2, 0.1, 0.05, fallback=0.2, prompt_low=0.5, prompt_skipped=0.1)
    assert Shares.of_counts({**answers, "tokens": 30, "fallback_tokens": 6}) == Shares(0.4, 0.2, 0.1, 0.05, 0.2, 0, 0)
