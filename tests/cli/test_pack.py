"""`moec pack` and then `moec unpack` give the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import moec.runtime.bundle.archive
from tests.tiny_compile import save_model

from .conftest import Invoke

pytestmark = pytest.mark.skipif(
    not hasattr(moec.runtime.bundle.archive, "pack_bundle"), reason="runtime/archive is not in the tree yet"
)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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
