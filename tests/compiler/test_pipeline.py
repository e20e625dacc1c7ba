"""Whole compiles of a tiny random model: every kind of target, what is refused, what is left behind."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.manifests.codec import decode_manifest
from moec.reporting.card import card_pictures
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.engine.engine import Engine
from moec.runtime.options.runtime import RuntimeOptions
from tests.tiny_compile import check_bundle, compile_tiny, contents, names, save_model, save_problems

pytestmark = pytest.mark.usefixtures("one_thread")
KL = 0.05


@pytest.fixture(scope="module")
def bundle(model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled to a KL with everything on: all formats, dense weights searched, comparisons."""
    output = tmp_path_factory.mktemp("full") / "tiny-moec"
    compile_tiny(model, output, "kl", KL, data=str(texts), quick=False)
    assert names(output.parent) == {"tiny-moec"}, "nothing but the bundle is left"
    return output


def test_a_kl_target_is_kept_by_a_measured_plan(bundle: Path) -> None:
    quality = check_bundle(bundle)
    size = quality["sizes"]["expert_packed_bytes"]
    measured = [t["kl"]["mean"] for t in quality["trials"] if t["purpose"] == "plan"]
    assert measured == [quality["comparison"]["plan_kl"]] and measured[0] <= KL
    assert size in [t["expert_packed_bytes"] for t in quality["trials"] if t["purpose"] == "search"]
    parts, sizes = quality["kl_by_part"], quality["sizes"]
    stored = [sizes["expert_packed_bytes"], sizes["dense_packed_bytes"]]
    assert parts["validation_kl"] == measured[0] and parts["predicted"][0]["kl"] > 0
    assert [row["bytes"] for row in parts["predicted"][:1]] == stored[:1]
    assert sum(row["bytes"] for row in parts["predicted"]) == pytest.approx(sum(stored), abs=len(stored))
    assert (quality["target"], quality["verdict"]) == ({"kind": "kl", "value": KL}, "supported")
    task = quality["tasks"]["perplexity"]
    assert task["n"] == 40 and task["verdict"] is None and 0 < task["kl"]["mean"] < 4 * KL


def test_the_report_names_the_baselines(bundle: Path) -> None:
    quality = check_bundle(bundle)
    rows = quality["comparison"]["baselines"]
    assert [row["name"] for row in rows] == ["best uniform", "EdgeMoE as published", "EdgeMoE with our quantizer"]
    for row in rows:
        assert row["gain_at_target"] == pytest.approx(
            1 - quality["sizes"]["expert_packed_bytes"] / row["expert_packed_bytes"]
        )
        assert len(row["frontier"]) >= 4


def test_the_report_holds_no_time_place_or_host(bundle: Path, model: Path, texts: Path) -> None:
    secrets = [str(bundle.parent), str(model.parent), str(texts.parent), socket.gethostname()]
    for name in ("quality.json", "moec.json", "README.md", "losses.svg", "bits.svg"):
        text = (bundle / name).read_text()
        assert not [secret for secret in secrets if len(secret) > 5 and secret in text], name

    def keys(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield key
                yield from keys(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from keys(inner)

    for name in ("quality.json", "moec.json"):
        found = set(keys(json.loads((bundle / name).read_bytes())))
        assert not [key for key in found if "second" in key or "time" in key or "date" in key or "host" in key]


def test_the_card_shows_pictures_that_are_files_of_the_bundle(bundle: Path) -> None:
    card, quality = (bundle / "README.md").read_text(), json.loads((bundle / "quality.json").read_bytes())
    manifest = decode_manifest((bundle / "moec.json").read_bytes(), "moec.json")
    drawn = card_pictures(manifest, quality)
    assert re.findall(r"!\[(.+)\]\((.+)\)", card) == [(picture.title, picture.name) for picture in drawn]
    assert [picture.name for picture in drawn] == ["losses.svg", "bits.svg"]
    listed = {entry.name: entry.sha256 for entry in manifest.files}
    for picture in drawn:
        assert (bundle / picture.name).read_bytes() == picture.data
        assert listed[picture.name] == hashlib.sha256(picture.data).hexdigest()


def test_the_manifest_says_how_it_was_made(bundle: Path) -> None:
    manifest = json.loads((bundle / "moec.json").read_bytes())
    assert manifest["calibration"]["task"] == "perplexity" and manifest["calibration"]["items"] == 8
    assert manifest["options"]["target"] == f"KL {KL} nats per token"
    assert manifest["device"]["profile"] == "raspberry-pi-4b-sd"
    assert (bundle / "README.md").read_text().startswith("# tiny, compiled by moec")


def test_bits_per_weight_without_data(model: Path, tmp_path: Path) -> None:
    result = compile_tiny(model, tmp_path / "out", "bits_per_weight", 4.2)
    quality = check_bundle(tmp_path / "out")
    assert quality["sizes"]["expert_bits_per_weight"] == result.plan.bits_per_weight <= 4.2
    assert 8 * quality["sizes"]["expert_packed_bytes"] <= 4.2 * result.plan.expert_weights
    assert (quality["verdict"], quality["tasks"], quality["trials"]) == ("not measured", {}, [])


def test_a_size_with_data_is_compared_at_that_size(model: Path, texts: Path, tmp_path: Path) -> None:
    budget = 20_000
    compile_tiny(model, tmp_path / "out", "size", budget, data=str(texts), comparisons=True)
    quality = check_bundle(tmp_path / "out")
    size = quality["sizes"]["expert_packed_bytes"]
    assert 0.9 * budget < size <= budget
    for row in quality["comparison"]["baselines"]:
        assert row["expert_packed_bytes"] <= size and row["gain_at_target"] is None


def test_a_loss_target_on_plain_text(model: Path, texts: Path, tmp_path: Path) -> None:
    compile_tiny(model, tmp_path / "out", "loss", 0.3, data=str(texts), tasks=("perplexity",))
    quality = check_bundle(tmp_path / "out")
    accepted = [t for t in quality["trials"] if t["accepted"]]
    assert quality["sizes"]["expert_packed_bytes"] == min(t["expert_packed_bytes"] for t in accepted)
    assert quality["tasks"]["perplexity"]["verdict"]["target"] == 0.3
    assert quality["verdict"] == quality["tasks"]["perplexity"]["verdict"]["status"]


def test_a_quick_compile_answers_a_sample_of_the_held_out_items_alone(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moec.compiler.stages.bundle.QUICK_ITEMS", 5)
    options: dict[str, Any] = {"data": str(texts), "tasks": ("perplexity",), "effort": "quick"}
    compile_tiny(model, tmp_path / "out", "loss", 0.3, **options)
    quality = check_bundle(tmp_path / "out")
    assert quality["tasks"]["perplexity"]["n"] == 5 and quality["verdict"] in ("met", "missed")
    assert quality["trials"] and not any(trial["losses"] for trial in quality["trials"])


def test_edgemoes_own_search_decides_by_whole_experts(model: Path, texts: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": str(texts), "quick": False, "dense_bits": 8, "group_sizes": (32,)}
    result = compile_tiny(model, tmp_path / "out", "kl", KL, search="edgemoe", **options)
    widths = {(u.layer, u.expert): set() for u in result.plan.units}
    for unit, spec in result.plan.units.items():
        widths[unit.layer, unit.expert].add(spec.bitwidth)
    assert all(len(found) == 1 for found in widths.values())
    quality = check_bundle(tmp_path / "out")
    assert not {"search", "swaps"} & {trial["purpose"] for trial in quality["trials"]}, "dense formats are fixed"
    own = quality["comparison"]["baselines"][2]
    assert own["expert_packed_bytes"] == quality["sizes"]["expert_packed_bytes"] and own["gain_at_target"] == 0
    assert quality["comparison"]["plan_kl"] <= KL
    losses = quality["comparison"]["expert_losses"]
    assert set(losses) == {row["name"] for row in quality["comparison"]["baselines"][1:]}
    popularity = quality["statistics"]["popularity"]
    assert all([len(row) for row in table] == [len(row) for row in popularity] for table in losses.values())
    assert len({loss for row in losses[own["name"]] for loss in row}) > 1


def test_edgemoes_search_by_popularity_is_next_to_the_plain_one(model: Path, texts: Path, tmp_path: Path) -> None:
    options = {"data": str(texts), "quick": False, "dense_bits": 8, "group_sizes": (32,), "plan_only": True}
    plain, weighed = (
        compile_tiny(model, tmp_path / search, "kl", KL, search=search, **options).quality
        for search in ("edgemoe", "edgemoe-popularity")
    )
    rows = weighed["comparison"]["baselines"]
    assert [row["name"] for row in rows[:3]] == [row["name"] for row in plain["comparison"]["baselines"]]
    assert [row["expert_packed_bytes"] for row in rows[:3]] == [
        row["expert_packed_bytes"] for row in plain["comparison"]["baselines"]
    ]
    assert rows[3]["name"] == "EdgeMoE with our quantizer, by popularity"
    assert rows[3]["expert_packed_bytes"] == weighed["sizes"]["expert_packed_bytes"]
    assert weighed["comparison"]["plan_kl"] <= KL
    assert weighed["comparison"]["expert_losses"] == plain["comparison"]["expert_losses"]


def test_exact_sensitivity_corrects_each_expert(model: Path, texts: Path, tmp_path: Path) -> None:
    result = compile_tiny(model, tmp_path / "out", "kl", KL, data=str(texts), sensitivity="exact", plan_only=True)
    corrections = {value for row in result.quality["sensitivity"]["corrections"] for value in row}
    assert len(corrections) > 1 and all(0.25 <= value <= 4 for value in corrections)


def test_group_sizes_that_fit_some_projections_only(texts: Path, tmp_path: Path) -> None:
    """96 columns: neither 64 nor 128 divides them, and both are on offer by default."""
    source = save_model(tmp_path / "tiny", width=96, experts=2, layers=1)
    compile_tiny(source, tmp_path / "out", "kl", 0.002, data=str(texts), quick=False, dense_bits=8)
    check_bundle(tmp_path / "out")
    # Only 16 bits fit the down projections.
    result = compile_tiny(source, tmp_path / "two", "kl", KL, data=str(texts), quick=False, group_sizes=(64,))
    assert {spec.bitwidth for unit, spec in result.plan.units.items() if unit.projection == "down"} == {16}


def test_every_task_must_meet_the_target(model: Path, texts: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(texts, data / "perplexity")
    save_problems(data / "gsm8k")
    compile_tiny(model, tmp_path / "out", "kl", KL, data=str(data), tasks=("perplexity", "gsm8k"))
    tasks = check_bundle(tmp_path / "out")["tasks"]
    assert {name: task["n"] for name, task in tasks.items()} == {"perplexity": 40, "gsm8k": 4}
    # The model solves no sum: there is no relative loss, and a KL target does not ask for one.
    assert tasks["gsm8k"]["baseline"] == 0 and tasks["gsm8k"]["loss"] is None
    assert tasks["gsm8k"]["kl"]["mean"] > 0 and tasks["perplexity"]["loss"]["n"] == 40
    assert "| gsm8k (4 items) | exact_match | 0.0000 | 0.0000 | - | - |" in (tmp_path / "out/README.md").read_text()


# -- output ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [{"kind": "uniform", "value": 4}, {"kind": "kl", "value": KL}])
def test_plan_only_writes_nothing(model: Path, texts: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    data = {} if values["kind"] == "uniform" else {"data": str(texts)}
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis").write_text("mine")
    before = contents(tmp_path), names(tmp_path)
    result = compile_tiny(model, tmp_path / "out", **values, **data, plan_only=True)
    assert result.path is None and result.quality["bits"]["formats"]
    assert (contents(tmp_path), names(tmp_path)) == before


def test_overwrite_replaces_at_the_very_end(model: Path, texts: Path, tmp_path: Path) -> None:
    compile_tiny(model, tmp_path / "out", "uniform", 4)
    old = contents(tmp_path / "out")
    seen: list[bool] = []

    @contextmanager
    def watching(path: Path, memory_bytes: int) -> Iterator[Any]:
        with open_partial(path, memory_bytes) as engine:
            yield engine
            seen.append(contents(tmp_path / "out") == old)

    compile_tiny(model, tmp_path / "out", "kl", KL, data=str(texts), overwrite=True, open_runtime=watching)
    assert seen == [True] * 4, "the bundle's KL, answers of the checkpoint and of the bundle, then the self-test"
    assert check_bundle(tmp_path / "out")["target"]["kind"] == "kl"
    assert names(tmp_path) == {"out"}


@pytest.mark.parametrize(("kind", "value"), [("kl", KL), ("loss", 0.02)])
def test_nothing_below_16_bits_on_offer(model: Path, texts: Path, tmp_path: Path, kind: Any, value: float) -> None:
    options: dict[str, Any] = {"bits": (16,), "dense_bits": 16, "plan_only": True}
    result = compile_tiny(model, tmp_path / "out", kind, value, data=str(texts), **options)
    assert result.plan.bits_per_weight == 16 and result.quality["comparison"] is None


def test_a_search_with_quanto_ends_in_a_bundle(model: Path, texts: Path, tmp_path: Path) -> None:
    result = compile_tiny(model, tmp_path / "out", "kl", 0.5, data=str(texts), quantizer="quanto", comparisons=True)
    assert result.path is not None
    manifest = json.loads((result.path / "moec.json").read_bytes())
    assert manifest["options"]["quantizer"] == "quanto"
    names = [row["name"] for row in result.quality["comparison"]["baselines"]]
    assert "EdgeMoE with our quantizer" in names


def test_eight_bits_are_used_where_128_divides_no_width(texts: Path, tmp_path: Path) -> None:
    """Widths of 576 and 192: a search between 8 and 16 bits, and answers of its bundle."""
    odd = save_model(tmp_path / "odd", layers=1, experts=2, hidden_size=576, width=192)
    options: dict[str, Any] = {"bits": (4, 8, 16), "group_sizes": (), "dense_bits": 8, "swaps": 0, "comparisons": False}
    result = compile_tiny(odd, tmp_path / "out", "bits_per_weight", 7.0, quick=False, data=str(texts), **options)
    assert "q8g64" in {str(spec) for spec in result.plan.units.values()}
    assert not {spec.bitwidth for spec in result.plan.units.values()} & {16}
    check_bundle(tmp_path / "out")
    with Engine(open_bundle(tmp_path / "out"), RuntimeOptions()) as engine:
        assert np.isfinite(engine.logits([5, 6, 7])).all()
