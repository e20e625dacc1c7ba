"""`moec inspect`, `verify`, `report`, `pack` and `unpack` on whole and on damaged bundles."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from moec.cli.documents import schema_text
from moec.runtime.bundle.open_bundle import open_bundle
from tests.tiny_compile import contents, save_model

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


TEXT = "one byte of this text is one token, so it is long enough for a few dozen of them"


@pytest.fixture
def trace(invoke: Invoke, mixed_bundle: Path, tmp_path: Path, laptop: None) -> Path:
    """Record a trace of 20 tokens."""
    text, path = tmp_path / "text.txt", tmp_path / "run.trace"
    text.write_text(TEXT)
    arguments = ("bench", mixed_bundle, "--text", text, "--prompt-tokens", 7, "--tokens", 20, "--expert-cache", "40%")
    assert invoke(*arguments, "--trace-out", path).exit_code == 0
    return path


def test_the_page_lies_next_to_the_bundle(invoke: Invoke, own_bundle: Path) -> None:
    before = contents(own_bundle)
    result = invoke("report", own_bundle)
    page = own_bundle.with_name("own-moec.report.html")
    assert result.exit_code == 0 and result.stdout == "" and str(page) in result.stderr
    assert "The quality was not measured" in page.read_text() and contents(own_bundle) == before
    assert invoke("report", own_bundle, "-o", "-").stdout == page.read_text()


def test_a_trace_adds_caches_and_one_token(invoke: Invoke, mixed_bundle: Path, trace: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    arguments = ("report", mixed_bundle, "--trace", trace, "--profile", "raspberry-pi-4b-sd", "-o", target)
    assert invoke(*arguments, "--expert-cache", "40%").exit_code == 0
    page = target.read_text()
    same = ("--trace", trace, "--profile", "raspberry-pi-4b-sd", "--expert-cache", "50%", "--json")
    told = json.loads(invoke("simulate", mixed_bundle, *same).stdout)
    for row in told["rows"]:
        assert f"{row['policy']}, 50%: {100 * row['hits'] / row['lookups']:.1f} %" in page
    assert "raspberry-pi-4b-sd, with a cache of 40%" in page
    total = re.search(r"experts: ([0-9.]+) ms, of it ([0-9]+)% waiting", page)
    assert total is not None and float(total[1]) > 0 and 0 < int(total[2]) < 100


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--profile", "laptop"), "`--profile` has no effect without a trace"),
        (("--expert-cache", "10%"), "`--expert-cache` has no effect without a trace"),
        (("--curve", "{text}"), "expected the JSON of a sweep"),
        (("--curve", "{text}.missing"), "text.txt.missing` is missing"),
        (("--curve", "/dev/zero"), "`/dev/zero` is a device"),
        (("--trace", "{text}"), "text.txt"),
    ],
)
def test_a_refusal_writes_nothing(
    invoke: Invoke, own_bundle: Path, tmp_path: Path, more: tuple[str, ...], told: str
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    given = [word.format(text=tmp_path / "text.txt") for word in more]
    before = sorted(tmp_path.iterdir())
    result = invoke("report", own_bundle, *given)
    assert result.exit_code == 1 and told in result.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_a_damaged_certificate_is_told_in_one_sentence(invoke: Invoke, own_bundle: Path) -> None:
    (own_bundle / "moec.json").write_text("{}")
    result = invoke("report", own_bundle)
    assert result.exit_code == 3 and not own_bundle.with_name("own-moec.report.html").exists()


def test_there_and_back(invoke: Invoke, own_bundle: Path, tmp_path: Path) -> None:
    packed = invoke("pack", own_bundle)
    assert packed.exit_code == 0 and "packed" in packed.stdout, packed.stderr
    file = own_bundle.with_name(own_bundle.name + ".moec")
    result = invoke("unpack", file, tmp_path / "again", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["source_bytes"] == file.stat().st_size
    assert contents(tmp_path / "again") == contents(own_bundle)
    assert invoke("verify", tmp_path / "again").exit_code == 0


def test_the_default_folder_is_the_file_without_its_ending(invoke: Invoke, own_bundle: Path, tmp_path: Path) -> None:
    assert invoke("pack", own_bundle, tmp_path / "small.moec").exit_code == 0
    assert invoke("unpack", tmp_path / "small.moec").exit_code == 0
    assert contents(tmp_path / "small") == contents(own_bundle)


def test_nothing_is_overwritten(invoke: Invoke, own_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "there.moec").write_bytes(b"mine")
    result = invoke("pack", own_bundle, tmp_path / "there.moec")
    assert result.exit_code == 1 and "exists already" in result.stderr
    assert (tmp_path / "there.moec").read_bytes() == b"mine"


def test_a_damaged_file_leaves_nothing(invoke: Invoke, own_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "small.moec"
    assert invoke("pack", own_bundle, file).exit_code == 0
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    result = invoke("unpack", file, tmp_path / "again")
    assert result.exit_code == 3 and "error: " in result.stderr and not (tmp_path / "again").exists()


def test_what_is_no_packed_file(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("unpack", tmp_path / "nowhere.moec")
    assert result.exit_code == 1 and "is not a file" in result.stderr


def test_the_size_that_an_archive_may_unpack_to(invoke: Invoke, own_bundle: Path, tmp_path: Path) -> None:
    assert invoke("pack", own_bundle, tmp_path / "small.moec").exit_code == 0
    size = sum(path.stat().st_size for path in own_bundle.iterdir())
    refused = invoke("unpack", tmp_path / "small.moec", "--max-size", str(size - 1))
    assert refused.exit_code == 1 and f"--max-size {size}" in refused.stderr and not list(tmp_path.glob("small*/"))
    assert invoke("unpack", tmp_path / "small.moec", "--max-size", "nothing").exit_code == 1
    assert invoke("unpack", tmp_path / "small.moec", "--max-size", str(size)).exit_code == 0
    assert contents(tmp_path / "small") == contents(own_bundle)


@pytest.mark.parametrize("lacks", ["nothing", "processors", "memory"])
def test_unpack_says_why_pull_would_choose_another_bundle(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    model, out = save_model(tmp_path / "tiny", layers=1), tmp_path / "out"
    device = ("--device", "raspberry-pi-5-nvme") if lacks == "processors" else ()
    assert invoke("compile", model, "--uniform", "4", *device, "-o", out).exit_code == 0
    assert invoke("pack", out, tmp_path / "out.moec").exit_code == 0
    monkeypatch.setattr("moec.profiles.probe.allowed_processors", lambda: set(range(97)))
    if lacks == "memory":
        monkeypatch.setattr("moec.profiles.probe.memory_limit_bytes", lambda: 5 << 20)
    result = invoke("unpack", tmp_path / "out.moec", tmp_path / "again")
    assert result.exit_code == 0, result.stderr
    reasons = {
        "nothing": "",
        "processors": "for `raspberry-pi-5-nvme` does not fit this machine: it has 97 threads, the profile 4",
        "memory": "for `host` does not fit this machine: it needs ",
    }  # fmt: skip
    assert reasons[lacks] in result.stderr and ("note: " in result.stderr) == (lacks != "nothing")
    assert ("MiB of memory, 5MiB are there" in result.stderr) == (lacks == "memory")
