"""Exactly one target, and no ambiguous number."""

from __future__ import annotations

from typing import Any

import pytest

from moec.compiler.request.targets import Target, choose_target, parse_loss, parse_sweep
from moec.manifests.errors import OptionError

NONE: dict[str, Any] = dict.fromkeys(("loss", "kl", "bits_per_weight", "size", "uniform"))


@pytest.mark.parametrize(
    ("text", "value"), [("2%", 0.02), ("2 %", 0.02), ("0.02", 0.02), (".02", 0.02), ("0.5%", 0.005), ("99.9%", 0.999)]
)
def test_losses(text: str, value: float) -> None:
    assert parse_loss(text) == pytest.approx(value, rel=1e-12)
    assert choose_target(**{**NONE, "loss": text}) == Target("loss", parse_loss(text))


def test_a_bare_two_could_mean_either() -> None:
    with pytest.raises(OptionError, match="ambiguous") as caught:
        parse_loss("2")
    assert caught.value.hint == "write `2%`"


@pytest.mark.parametrize(
    "text", ["100%", "150%", "0", "0%", "-1%", "", "two", "2%%", "1e-2", "1", "nan", "%", "9" * 400]
)
def test_what_is_no_loss(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_loss(text)
    assert caught.value.hint


def test_exactly_one_target() -> None:
    with pytest.raises(OptionError, match="found none") as caught:
        choose_target(**NONE)
    assert "--loss" in str(caught.value.hint) and "--uniform" in str(caught.value.hint)
    with pytest.raises(OptionError, match="found --loss and --size"):
        choose_target(**{**NONE, "loss": "2%", "size": "1GB"})


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ({"kl": 0.05}, Target("kl", 0.05)),
        ({"bits_per_weight": 3.25}, Target("bits_per_weight", 3.25)),
        ({"bits_per_weight": 16.0}, Target("bits_per_weight", 16.0)),
        ({"size": "900MB"}, Target("size", 900_000_000)),
        ({"uniform": 3}, Target("uniform", 3)),
    ],
)
def test_targets(given: dict[str, Any], target: Target) -> None:
    assert choose_target(**{**NONE, **given}) == target
    assert str(target)


@pytest.mark.parametrize(
    "given",
    [
        {"kl": 0.0},
        {"kl": -1.0},
        {"kl": float("nan")},
        {"kl": float("inf")},
        {"bits_per_weight": 0.0},
        {"bits_per_weight": 16.5},
        {"bits_per_weight": float("nan")},
        {"uniform": 7},
        {"uniform": 0},
    ],
)
def test_targets_out_of_range(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        choose_target(**{**NONE, **given})
    assert caught.value.hint


@pytest.mark.parametrize("text", ["x", "1%,nan", "0.5%..x"])
def test_a_loss_of_a_sweep_is_named_by_its_option(text: str) -> None:
    with pytest.raises(OptionError, match="`--sweep "):
        parse_sweep(text)
