"""Exactly one target; options that are out of range, exclude each other, or have no effect are refused before work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from moec.compiler.request.options import DEFAULT_BITS, FEW_GROUP_SIZES, QUICK_GROUP_SIZES, CompileOptions
from moec.compiler.request.targets import Target, choose_target, parse_loss, parse_sweep
from moec.manifests.errors import OptionError
from moec.manifests.quant import BITWIDTHS, QuantSpec

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


KL, SIZE, UNIFORM = Target("kl", 0.05), Target("size", 1e6), Target("uniform", 4)
BF16 = QuantSpec(16, float_type="bfloat16")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"dense_bits": 3}, "--dense-bits 3"),
        ({"bits": ()}, "--bits"),
        ({"bits": (2, 7)}, "--bits"),
        ({"group_sizes": (48,)}, "--group-size 48"),
        ({"group_sizes": (-32,)}, "--group-size -32"),
        ({"quantizer": "awq"}, "awq"),
        ({"objective": "speed"}, "speed"),
        ({"shots": -1}, "shots"),
        ({"limit": 0}, "limit"),
        ({"swaps": -1}, "--swaps -1"),
        ({"tasks": ("gsm8k", "gsm8k")}, "twice"),
    ],
)
def test_out_of_range(values: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError) as caught:
        CompileOptions(KL, data="items.jsonl", **values)
    assert named in caught.value.message and caught.value.hint


@pytest.mark.parametrize(
    ("target", "values", "option"),
    [
        (UNIFORM, {"tasks": ("gsm8k",)}, "--task"),
        (UNIFORM, {"bits": (2, 4)}, "--bits"),
        (UNIFORM, {"search": "edgemoe"}, "--search"),
        (UNIFORM, {"sensitivity": "exact"}, "--sensitivity"),
        (UNIFORM, {"objective": "size"}, "--objective"),
        (UNIFORM, {"limit": 5}, "--limit"),
        (UNIFORM, {"shots": 5}, "--shots"),
        (Target("uniform", 16), {"group_sizes": (32,)}, "--group-size"),
        (SIZE, {"tasks": ("gsm8k",)}, "--task"),
        (SIZE, {"search": "edgemoe"}, "--search"),
        (UNIFORM, {"path_keys": "pairs"}, "--set path-keys"),
        (SIZE, {"path_keys": "pairs"}, "--set path-keys"),
        (SIZE, {"sensitivity": "proxy"}, "--sensitivity"),
        (SIZE, {"objective": "bytes-per-token"}, "--objective"),
        (UNIFORM, {"swaps": 3}, "--swaps"),
        (UNIFORM, {"prune": False}, "--prune-experts/--keep-experts"),
        (UNIFORM, {"torch_device": "cuda"}, "--torch-device"),
        (KL, {"data": "a", "search": "edgemoe", "prune": True}, "--prune-experts/--keep-experts"),
        (KL, {"data": "a", "search": "edgemoe", "bits": (4, 8)}, "--bits"),
        (KL, {"data": "a", "search": "edgemoe", "comparisons": False}, "--comparisons/--no-comparisons"),
        (KL, {"data": "a", "search": "edgemoe-popularity", "swaps": 2}, "--swaps"),
    ],
)
def test_options_without_effect(target: Target, values: dict[str, Any], option: str) -> None:
    with pytest.raises(OptionError, match="has no effect") as caught:
        CompileOptions(target, **values)
    assert f"`{option}`" in caught.value.message and caught.value.hint


@pytest.mark.parametrize("target", [KL, Target("loss", 0.02)])
def test_what_is_measured_needs_data(target: Target) -> None:
    with pytest.raises(OptionError, match="measured on text") as caught:
        CompileOptions(target)
    assert "--uniform" in str(caught.value.hint)


def test_uniform_takes_one_group_size() -> None:
    with pytest.raises(OptionError, match="one `--group-size`"):
        CompileOptions(UNIFORM, group_sizes=(32, 64))
    assert CompileOptions(UNIFORM, group_sizes=(32,), quantizer="quanto", dense_bits=4).group_sizes == (32,)


def test_formats_on_offer_are_those_with_a_kernel_smallest_first() -> None:
    options = CompileOptions(KL, data="items.jsonl")
    specs = options.unit_specs(BITWIDTHS, BF16)
    sizes = [spec.bits_per_weight(256) for spec in specs]
    assert sizes == sorted(sizes) and specs[-1] == BF16
    assert [str(spec) for spec in specs if spec.bitwidth == 8] == ["q8g128"]
    assert {spec.bitwidth for spec in options.unit_specs((4, 8), BF16)} == {4, 8}
    per_row = CompileOptions(KL, data="items.jsonl", bits=(3, 8), group_sizes=(32, 0)).unit_specs(BITWIDTHS, BF16)
    assert [str(spec) for spec in per_row] == ["q3", "q3g32b", "q8"]


def test_a_large_model_gets_half_of_the_formats() -> None:
    def offered(widths: tuple[int, ...], groups: Mapping[float, tuple[int, ...]], **values: Any) -> list[str]:
        options = CompileOptions(KL, data="items.jsonl", **values)
        return [str(spec) for spec in options.unit_specs(BITWIDTHS, BF16, widths, usual_groups=groups)]

    few = ["q1g128b", "q1.6g128s", "q2g128b", "q2g64b", "q3g128b", "q3g64b", "q4g64b", "q4g32b", "q8g128", "bf16"]
    quick = ["q1.6g128s", "q2g64b", "q3g64b", "q4g64b", "q8g128", "bf16"]
    assert offered((2048, 1024), FEW_GROUP_SIZES) == few
    assert offered((2048, 1024), QUICK_GROUP_SIZES) == quick
    assert offered((2048, 1024), QUICK_GROUP_SIZES, bits=(1, 2)) == ["q1g128b", "q1g64b", "q2g64b"], "as asked"
    for groups in (FEW_GROUP_SIZES, QUICK_GROUP_SIZES):
        assert len(offered((2048, 1024), groups, group_sizes=(32, 64))) > len(few) - 2, "as asked"
        assert set(offered((2880,), groups)) > {"q4g32b", "q2g32b"}, "128 does not divide the width"


@pytest.mark.parametrize(
    ("widths", "values", "offered"),
    [
        ((2048, 1408), {}, ["q8g128"]),
        ((576, 192), {}, ["q8g64"]),
        ((2880,), {}, ["q8g64"]),
        ((96, 160), {}, ["q8g32"]),
        ((4096, 576), {}, ["q8g128", "q8g64"]),
        ((576,), {"group_sizes": (32, 0)}, ["q8"]),
        ((576,), {"group_sizes": (32,)}, ["q8g32"]),
        ((576,), {"quantizer": "quanto"}, ["q8"]),
        ((100,), {}, ["q8g128"]),  # nothing fits; preflight says so
    ],
)
def test_eight_bits_come_in_the_widest_groups_that_divide(
    widths: tuple[int, ...], values: dict[str, Any], offered: list[str]
) -> None:
    specs = CompileOptions(KL, data="items.jsonl", **values).unit_specs(BITWIDTHS, BF16, widths)
    assert [str(spec) for spec in specs if spec.bitwidth == 8] == offered


def test_five_and_six_bits_are_on_offer_by_request() -> None:
    default = CompileOptions(KL, data="items.jsonl")
    assert not {spec.bitwidth for spec in default.unit_specs(BITWIDTHS, BF16)} & {5, 6}
    options = CompileOptions(KL, data="items.jsonl", bits=(5, 6, 16))
    specs = options.unit_specs(BITWIDTHS, BF16)
    assert [str(spec) for spec in specs] == ["q5g128b", "q5g64b", "q5g32b", "q6g128", "q6g64", "q6g32", "bf16"]
    assert options.to_plain()["bits"] == "5,6,16"
    quanto = CompileOptions(KL, data="items.jsonl", bits=(5, 6), group_sizes=(64,), quantizer="quanto")
    assert [str(spec) for spec in quanto.unit_specs(BITWIDTHS, BF16)] == ["q5g64", "q6g64"]
    assert 5 not in options.dense_widths()


def test_bits_that_quanto_lacks_are_named() -> None:
    with pytest.raises(OptionError, match="quanto has none below 2"):
        CompileOptions(KL, data="items.jsonl", quantizer="quanto", bits=(1,)).unit_specs(BITWIDTHS, BF16)


def test_three_values_come_in_whole_tiles() -> None:
    def offered(bits: tuple[float, ...], *groups: int) -> list[str]:
        options = CompileOptions(KL, data="items.jsonl", bits=bits, group_sizes=groups)
        return [str(spec) for spec in options.unit_specs(BITWIDTHS, BF16) if spec.is_ternary]

    assert offered(DEFAULT_BITS) == offered((1.6, 2)) == ["q1.6s", "q1.6g128s"]
    assert offered((1.6,), 32, 64, 0) == ["q1.6s", "q1.6g64s"]
    assert offered(DEFAULT_BITS, 32) == []
    with pytest.raises(OptionError, match=r"1\.6 bits come in groups of a multiple of 64 columns, found .* 32, 96`"):
        offered((1.6, 2), 32, 96)
    with pytest.raises(OptionError, match=r"1\.6 bits come in groups"):
        CompileOptions(Target("uniform", 1.6), group_sizes=(96,))
    quanto = CompileOptions(KL, data="items.jsonl", quantizer="quanto").unit_specs(BITWIDTHS, BF16)
    assert min(spec.bitwidth for spec in quanto) == 2


@pytest.mark.parametrize(("bits", "symmetric", "kind"), [(1.6, False, "symmetric"), (1, True, "asymmetric")])
def test_formats_of_one_kind_are_not_asked_for_the_other(bits: float, symmetric: bool, kind: str) -> None:
    with pytest.raises(OptionError, match=f"weights of {bits} bits are always {kind}"):
        CompileOptions(Target("uniform", bits), symmetric=symmetric)
    assert CompileOptions(Target("uniform", bits), symmetric=not symmetric).is_uniform_symmetric is not symmetric


def test_no_kernel_for_any_bitwidth() -> None:
    with pytest.raises(OptionError, match="kernel"):
        CompileOptions(KL, data="items.jsonl", bits=(3,)).unit_specs((4, 8), BF16)


def test_the_manifest_learns_what_decides_the_bytes_and_no_place() -> None:
    plain = CompileOptions(KL, data="/home/someone/items.jsonl", limit=7).to_plain()
    assert plain["limit"] == "7" and plain["target"] == "KL 0.05 nats per token"
    assert "someone" not in str(plain)


@pytest.mark.parametrize(
    ("bits", "values", "symmetric"),
    [
        (4, {"group_sizes": (32,)}, True),
        (8, {"group_sizes": (32,)}, True),
        (4, {}, False),
        (3, {"group_sizes": (32,)}, False),
        (4, {"group_sizes": (32,), "quantizer": "quanto"}, False),
        (4, {"group_sizes": (32,), "symmetric": False}, False),
        (2, {"symmetric": True}, True),
        (1.6, {}, True),
    ],
)
def test_minima_cost_more_than_they_bring_in_narrow_groups(
    bits: float, values: dict[str, Any], symmetric: bool
) -> None:
    assert CompileOptions(Target("uniform", bits), **values).is_uniform_symmetric is symmetric


@pytest.mark.parametrize("target", [SIZE, Target("uniform", 16)])
def test_symmetric_belongs_to_uniform_formats(target: Target) -> None:
    with pytest.raises(OptionError, match="--symmetric"):
        CompileOptions(target, symmetric=True)
    assert not CompileOptions(target).is_uniform_symmetric


def test_what_a_sweep_names() -> None:
    assert parse_sweep("0.5%..20%") == (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
    assert parse_sweep("1.5%..3%") == (0.015, 0.02, 0.03)
    assert parse_sweep("5%,1%,2%,1%") == (0.01, 0.02, 0.05)
    assert parse_sweep("2%") == (0.02,)
    for wrong in ("20%..1%", "1%..1%", "..", "1..2", "0%..5%", "x", "1%,nan", "0.5%..x"):
        with pytest.raises(OptionError, match="`--sweep "):
            parse_sweep(wrong)
