"""`moec inspect` and `moec verify` on whole and on damaged bundles."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from moec.cli.documents import schema_text
from moec.runtime.bundle.open_bundle import open_bundle

from .conftest import Invoke


def test_inspect_tells_shape_formats_and_sizes(invoke: Invoke, mixed_bundle: Path) -> None:
    result = invoke("inspect", mixed_bundle, "--json")
    assert result.exit_code == 0 and result.stderr == ""
    values = json.loads(result.stdout)
    manifest = open_bundle(mixed_bundle).manifest
    assert values["model"]["layers"] == 3 and values["model"]["experts"] == 8 and values["model"]["top_k"] == 2
    assert sum(sum(counts.values()) for counts in values["formats"]["experts"].values()) == 3 * 3 * 8
    assert [len(row) for row in values["formats"]["bits"]] == [8, 8, 8]
    mean = sum(map(sum, values["formats"]["bits"])) / 24
    assert mean == pytest.approx(values["formats"]["bits_per_weight"], abs=1e-3)
    assert values["sizes"]["expert_packed_bytes"] == manifest.cost.expert_packed_bytes
    assert values["sizes"]["expert_16_bit_bytes"] == 2 * values["model"]["expert_weights"]
    assert values["memory"]["floor_bytes"] > values["sizes"]["minimum_expert_bytes"]


def test_inspect_draws_a_line_per_layer(invoke: Invoke, mixed_bundle: Path) -> None:
    result = invoke("inspect", mixed_bundle)
    lines = [line for line in result.stdout.splitlines() if line.startswith("layer ")]
    assert len(lines) == 3 and all(len(set(line.split()[2])) > 1 for line in lines)
    names = ("experts", "dense", "bits per weight", "read per token", "memory floor", "kernels", "quality was not")
    for name in names:
        assert any(line.startswith(name) for line in result.stdout.splitlines()), name


def test_inspect_of_16_bit_is_full_height(invoke: Invoke, bundle: Path) -> None:
    values = json.loads(invoke("inspect", bundle, "--json").stdout)
    assert {bits for row in values["formats"]["bits"] for bits in row} == {16.0}
    assert "█" * 8 + "  16.00" in invoke("inspect", bundle).stdout


def test_the_schema_accepts_a_real_manifest(mixed_bundle: Path) -> None:
    jsonschema.validate(json.loads((mixed_bundle / "moec.json").read_text()), json.loads(schema_text()))


def test_verify_says_that_all_is_well(invoke: Invoke, mixed_bundle: Path) -> None:
    result = invoke("verify", mixed_bundle)
    assert result.exit_code == 0 and result.stderr == "" and "is whole" in result.stdout
    values = json.loads(invoke("verify", mixed_bundle, "--json").stdout)
    assert values["ok"] is True and values["experts"] == 24 and values["name"] == "tiny"


@pytest.mark.parametrize("name", ["experts-00001.safetensors", "dense.safetensors", "tokenizer.json", "moec.json"])
def test_verify_names_the_damaged_file(invoke: Invoke, own_bundle: Path, name: str) -> None:
    path = own_bundle / name
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) * 3 // 4] ^= 1
    path.write_bytes(damaged)
    result = invoke("verify", own_bundle)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("error: ") and name in result.stderr and "hint: " in result.stderr


def test_verify_names_the_damaged_expert(invoke: Invoke, own_bundle: Path) -> None:
    entry = open_bundle(own_bundle).manifest.experts[13]
    with (own_bundle / entry.file).open("r+b") as file:
        file.seek(entry.offset_bytes + 100)
        byte = file.read(1)[0]
        file.seek(entry.offset_bytes + 100)
        file.write(bytes([byte ^ 16]))
    result = invoke("verify", own_bundle)
    assert result.exit_code == 3 and f"expert {entry.expert} of layer {entry.layer}" in result.stderr


def test_a_missing_an_extra_and_a_short_file(invoke: Invoke, own_bundle: Path) -> None:
    (own_bundle / "note.txt").write_text("x")
    result = invoke("verify", own_bundle)
    assert result.exit_code == 3 and "`note.txt`, which the manifest does not list" in result.stderr
    (own_bundle / "note.txt").unlink()
    tables = own_bundle / "tables.safetensors"
    whole = tables.read_bytes()
    tables.write_bytes(whole[:-1])
    result = invoke("inspect", own_bundle)
    assert result.exit_code == 3 and f"has {len(whole) - 1} bytes, expected {len(whole)}" in result.stderr
    tables.unlink()
    result = invoke("run", own_bundle, "--prompt", "x")
    assert result.exit_code == 3 and "tables.safetensors` is missing" in result.stderr


@pytest.mark.parametrize("content", [b"{]\n", b"[]\n", b"\xff{}"])
def test_a_damaged_certificate_is_refused(invoke: Invoke, own_bundle: Path, content: bytes) -> None:
    (own_bundle / "quality.json").write_bytes(content)
    result = invoke("inspect", own_bundle)
    assert result.exit_code == 3 and "quality.json" in result.stderr


def test_a_certificate_of_another_form_is_refused(invoke: Invoke, mixed_bundle: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    quality = {"verdict": "met", "tasks": []}
    monkeypatch.setattr("moec.cli.commands.bundles.inspect.read_quality", lambda folder: quality)
    result = invoke("inspect", mixed_bundle)
    assert result.exit_code == 3 and "does not have the form of a certificate" in result.stderr


def test_the_verdict_stands_below_the_sizes(invoke: Invoke, mixed_bundle: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    quality = {"target": {"kind": "size", "value": 9}, "verdict": "not measured", "tasks": {}, "trials": [1] * 1000}
    monkeypatch.setattr("moec.cli.commands.bundles.inspect.read_quality", lambda folder: quality)
    assert "quality is not measured" in invoke("inspect", mixed_bundle).stdout.splitlines()[-1]
    told = json.loads(invoke("inspect", mixed_bundle, "--json").stdout)["quality"]
    assert told == {"target": {"kind": "size", "value": 9}, "verdict": "not measured", "tasks": {}}


@pytest.mark.parametrize("rows", [[], [{"ahead": 1}], "three"])
def test_what_was_learned_is_told(invoke: Invoke, mixed_bundle: Path, monkeypatch, rows: object) -> None:  # type: ignore[no-untyped-def]
    quality = {"target": {"kind": "size", "value": 9}, "verdict": "not measured", "tasks": {}}
    good = {"rows": [{"ahead": 1, "layers": [0], "recall": 0.9, "own_recall": 0.7}]}
    monkeypatch.setattr("moec.cli.commands.bundles.inspect.read_quality", lambda folder: {**quality, "lookahead": good})
    told = "learned routers  90.0% of the choices 1 layer ahead foreseen, 70.0% without"
    assert told in invoke("inspect", mixed_bundle).stdout.splitlines()
    damaged = {**quality, "lookahead": {"rows": rows}}
    monkeypatch.setattr("moec.cli.commands.bundles.inspect.read_quality", lambda folder: damaged)
    result = invoke("inspect", mixed_bundle)
    assert result.exit_code == 0 and "learned routers" not in result.stdout
