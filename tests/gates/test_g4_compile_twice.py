"""G4: two compiles give identical bytes: in two processes, in two folders, with two probes of one machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from moec.cli.main import cli
from tests.tiny_compile import check_bundle, compile_tiny, contents, pi, save_model, save_texts

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = ("--kl", "0.05", "--group-size", "32", "--device", "raspberry-pi-4b-sd")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model `tiny` and the data `texts`."""
    folder = tmp_path_factory.mktemp("one")
    save_model(folder / "tiny", layers=1, experts=3)
    save_texts(folder / "texts")
    return folder


@pytest.mark.gate("G4")
def test_two_processes_of_one_and_three_threads_in_two_places_write_the_same_bundle(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process has a package `ray` that cannot be loaded, because one machine needs none."""
    monkeypatch.chdir(place)
    first = CliRunner().invoke(cli, ["compile", "tiny", "--data", "texts", *OPTIONS])
    assert first.exit_code == 0, first.stderr
    elsewhere, output = tmp_path / "elsewhere", tmp_path / "deep" / "down" / "other-name"
    shutil.copytree(place / "tiny", elsewhere / "tiny")
    shutil.copytree(place / "texts", elsewhere / "other-texts")
    output.parent.mkdir(parents=True)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "ray.py").write_text("raise SystemExit('a compile on one machine loads Ray')\n")
    arguments = [elsewhere / "tiny", "-o", output, "--data", elsewhere / "other-texts", *OPTIONS]
    path = [str(tmp_path / "first"), *sys.path]
    second = subprocess.run(
        [sys.executable, "-m", "moec.cli.main", "compile", *map(str, arguments)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in path if p), "PYTHONHASHSEED": "7"}
        | {"OMP_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert second.returncode == 0, second.stderr
    one, two = contents(place / "tiny-moec"), contents(output)
    assert one.keys() == two.keys() and len(one) >= 8
    assert [name for name in one if one[name] != two[name]] == []
    quality = check_bundle(output)
    assert len(quality["bits"]["formats"]) > 1 and len(quality["trials"]) > 10, "there was no search to repeat"
    assert quality["comparison"] is not None and quality["tasks"]["perplexity"]["n"] == 40
    assert json.loads((output / "moec.json").read_bytes())["calibration"]["tokens"] > 0


@pytest.mark.gate("G4")
def test_two_probes_of_one_machine_write_the_same_bundle(place: Path, tmp_path: Path) -> None:
    """Results of a probe vary. A bundle for `host` neither contains nor depends on the varying ones."""
    host = replace(pi(), name="host", is_probed=True, memory_budget_bytes=2_051_000_000)
    rates = {
        "memory_bytes_per_s": 6_200_000_000,
        "storage_bytes_per_s": 35_000_000,
        "memory_budget_bytes": 2_099_999_999,
    }
    for name, profile in (("one", host), ("two", replace(host, **rates))):
        compile_tiny(place / "tiny", tmp_path / name, "kl", 0.05, data=str(place / "texts"), profile=profile)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert not (tmp_path / "one" / "device.json").exists()
    assert json.loads((tmp_path / "one" / "moec.json").read_bytes())["device"]["memory_budget_bytes"] == 0


@pytest.mark.gate("G4")
def test_the_gate_sees_another_seed(place: Path, tmp_path: Path) -> None:
    """Compiles with another seed differ, because the seed is in the bundle."""
    compile_tiny(place / "tiny", tmp_path / "one", "bits_per_weight", 4.0)
    compile_tiny(place / "tiny", tmp_path / "two", "bits_per_weight", 4.5)
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert {name for name in one if one[name] != two[name]} >= {
        "moec.json",
        "quality.json",
        "experts-00000.safetensors",
    }
