"""The tasks for which a verdict holds."""

from __future__ import annotations

from typing import Any

import pytest

from moec.evaluation.verdict_scope import verdict_scope


@pytest.mark.parametrize(
    ("quality", "scope"),
    [
        (None, ""),
        ({}, ""),
        ({"verdict": "not measured", "tasks": {}}, ""),
        ({"verdict": "measured", "tasks": {"gsm8k": {}}}, ""),
        ({"verdict": ["supported"], "tasks": {"gsm8k": {}}}, ""),
        ({"verdict": "supported", "tasks": ["gsm8k"]}, ""),
        ({"verdict": "supported", "tasks": {}}, ""),
        ({"verdict": "supported", "tasks": {"gsm8k": {}}}, "supported for gsm8k; other tasks were not measured"),
        ({"verdict": "refuted", "tasks": {"b": {}, "a": {}}}, "refuted for a, b; other tasks were not measured"),
        (
            {"verdict": "met", "tasks": {}, "held_out_kl": {"perplexity": {}}},
            "met for perplexity; other tasks were not measured",
        ),
    ],
)
def test_the_scope_of_a_verdict(quality: dict[str, Any] | None, scope: str) -> None:
    assert verdict_scope(quality) == scope
