"""Files of `--curve`: sweeps and curves of other engines; anything else is one sentence."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.errors import InputError
from moec.reporting.curves import Curve, CurvePoint, read_curves

SWEEP = {
    "curve": [
        {"target": 0.01, "expert_packed_bytes": 300, "kl": 0.002, "baselines": {"best uniform": 400}},
        {"target": 0.05, "expert_packed_bytes": None, "kl": None, "baselines": {"best uniform": None}},
    ]
}


def test_a_sweep_has_its_own_curve_and_those_of_its_baselines() -> None:
    own = Curve("moec", [CurvePoint(300, 0.01, 0.002)])
    assert read_curves(json.dumps(SWEEP).encode(), "f") == [own, Curve("best uniform", [CurvePoint(400, 0.01, None)])]


def test_curves_of_other_engines() -> None:
    plain = [{"name": "Q4_K_M", "points": [{"bytes": 500, "kl": 0.07, "loss": None}]}]
    assert read_curves(json.dumps(plain).encode(), "f") == [Curve("Q4_K_M", [CurvePoint(500, None, 0.07)])]


@pytest.mark.parametrize(
    "plain",
    [
        {},
        [1],
        [{"name": 5, "points": []}],
        [{"name": "x", "points": [{"bytes": -1}]}],
        [{"name": "x", "points": [{"bytes": 5, "kl": "much"}]}],
        {"curve": [{"target": "1 %"}]},
        {"curve": 5},
        [{"name": "\ud800", "points": []}],
        {"curve": [{"target": 0.01, "expert_packed_bytes": 3, "baselines": {"\udfff": 400}}]},
        [{"name": "x", "points": [{"bytes": 5, "loss": 1e308}]}],
        [{"name": "x", "points": [{"bytes": 5, "kl": -1e7}]}],
        [{"name": "x", "points": [{"bytes": 5, "loss": 10**400}]}],
        [{"name": "x", "points": []}] * 33,
    ],
)
def test_other_content_is_refused_in_one_sentence(plain: object) -> None:
    with pytest.raises(InputError) as refused:
        read_curves(json.dumps(plain).encode(), "other.json")
    assert refused.value.message.startswith("`other.json`: expected") and refused.value.hint


@given(st.binary(max_size=200))
def test_any_bytes_are_curves_or_refused(data: bytes) -> None:
    try:
        assert isinstance(read_curves(data, "f"), list)
    except InputError as refused:
        assert "`f`" in refused.message
