"""One format for all experts, and another one for dense weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from moec.compiler.checkpoint.checkpoint import open_checkpoint
from moec.compiler.families import Lowering, lower
from moec.compiler.request.uniform import uniform_plan
from moec.manifests.errors import PlanError
from moec.manifests.quant import QuantSpec
from tests.tiny_models import TinyMixtral, save_tiny_mixtral


def _open(path: Path) -> Lowering:
    return lower(open_checkpoint(str(path)))


def test_uniform_plans(tmp_path: Path) -> None:
    model = _open(save_tiny_mixtral(tmp_path / "tiny")).model
    plan = uniform_plan(model, QuantSpec(3, 32), QuantSpec(8, 32), "bfloat16")
    assert plan.bits_per_weight == 3 + 32 / 32
    assert {str(spec) for spec in plan.units.values()} == {"q3g32"}
    formats = {name: str(spec) for name, spec in plan.dense.items()}
    assert (formats["embedding"], formats["layers.1.router"], formats["final_norm"]) == ("q8g32", "bf16", "bf16")
    with pytest.raises(PlanError, match="format q4g64 cannot hold expert matrices of 96 columns"):
        uniform_plan(model, QuantSpec(4, 64), QuantSpec(8, 64), "bfloat16")
    odd = _open(save_tiny_mixtral(tmp_path / "odd", TinyMixtral(heads=3, kv_heads=1, head_size=32))).model
    dense = uniform_plan(odd, QuantSpec(4), QuantSpec(4), "float16").dense
    assert str(dense["layers.0.output"]) == "q4"
    dense = uniform_plan(odd, QuantSpec(16, float_type="float16"), QuantSpec(8, 64), "float16").dense
    assert (str(dense["layers.0.query"]), str(dense["layers.0.output"])) == ("q8g64", "q8")
    narrow = _open(save_tiny_mixtral(tmp_path / "narrow", TinyMixtral(width=40))).model
    with pytest.raises(PlanError, match="use --uniform 16"):
        uniform_plan(narrow, QuantSpec(4), QuantSpec(8), "bfloat16")
    plan = uniform_plan(narrow, QuantSpec(16, float_type="bfloat16"), QuantSpec(8), "bfloat16")
    assert {str(spec) for spec in plan.units.values()} == {"bf16"}
