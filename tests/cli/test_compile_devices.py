"""`moec compile --device a,b`: the bundles, the table of predicted speeds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moec.manifests.sizes import exact_bytes
from moec.profiles.device_json import decode_device
from moec.profiles.loading import load_profile
from tests.tiny_compile import check_bundle, names, save_model, save_texts

from .conftest import Invoke

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICES = ("raspberry-pi-4b-sd", "laptop")
QUICK = ("--bits", "2,4,16", "--group-size", "32", "--dense-bits", "8", "--no-comparisons", "--swaps", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("devices") / "tiny", layers=2, experts=4)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_texts(tmp_path_factory.mktemp("texts") / "data")


def test_one_bundle_per_device(invoke: Invoke, model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "tiny"
    result = invoke("compile", model, "--kl", 0.05, "--data", data, *QUICK, "--device", ",".join(DEVICES), "-o", out)
    assert result.exit_code == 0, result.stderr
    folders = [out.with_name(f"tiny-{name}") for name in DEVICES]
    assert {folder.name for folder in folders} <= names(out.parent)
    assert not {"tiny", "tiny.work", "tiny.lock"} & names(out.parent)
    for name, folder in zip(DEVICES, folders, strict=True):
        check_bundle(folder)
        assert json.loads((folder / "moec.json").read_text())["device"]["profile"] == name
        log = json.loads(folder.with_name(folder.name + ".log.json").read_text())
        assert log["model"] == str(model) and log["events"]
        assert decode_device((folder / "device.json").read_bytes(), "device.json") == load_profile(name)
        budget = exact_bytes(load_profile(name).memory_budget_bytes)
        assert f"run      on {name} with --memory {budget} --threads " in result.stdout
        assert f"device   {name}" in result.stdout and f"predicted TPOT on {name}" in result.stdout


def test_plans_alone(invoke: Invoke, model: Path, data: Path, tmp_path: Path) -> None:
    options = ("--kl", 0.05, "--data", data, *QUICK, "--device", ",".join(DEVICES), "-o", tmp_path / "out")
    result = invoke("compile", model, *options, "--plan-only", "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert set(told["devices"]) == set(DEVICES) and [row["device"] for row in told["predicted_token_ns"]] == [*DEVICES]
    assert names(tmp_path) == set()


@pytest.mark.parametrize("devices", [DEVICES[:1], DEVICES], ids=["one", "two"])
@pytest.mark.parametrize(
    ("target", "value", "has_data", "is_plan"),
    [
        ("--uniform", "2", False, False),
        ("--uniform", "3", False, True),
        ("--uniform", "4", True, False),
        ("--uniform", "8", True, True),
        ("--uniform", "16", False, True),
        ("--kl", "0.05", True, True),
        ("--loss", "50%", True, False),
        ("--bits-per-weight", "4", False, False),
        ("--bits-per-weight", "5", True, True),
        ("--size", "60KiB", False, True),
        ("--size", "60KiB", True, False),
    ],
)
def test_each_target(
    target: str,
    value: str,
    has_data: bool,
    is_plan: bool,
    devices: tuple[str, ...],
    invoke: Invoke,
    model: Path,
    data: Path,
    tmp_path: Path,
) -> None:
    given = ("--data", data, "--limit", 4) if has_data else ()
    search = () if target == "--uniform" else QUICK if has_data else QUICK[:-2]
    out = tmp_path / "tiny"
    options = (*given, *search, *(("--plan-only",) if is_plan else ()))
    result = invoke("compile", model, target, value, *options, "--device", ",".join(devices), "-o", out)
    assert result.exit_code == 0, result.stderr
    folders = [out] if len(devices) == 1 else [out.with_name(f"tiny-{name}") for name in devices]
    assert [folder.exists() for folder in folders] == [not is_plan] * len(devices)


@pytest.mark.parametrize(
    ("devices", "more", "message"),
    [
        ("laptop,laptop", (), "two devices of the name `laptop`"),
        ("laptop,", (), "has an empty name"),
        ("laptop,pi9", (), "no device profile is called `pi9`"),
        ("laptop,raspberry-pi-4b-sd", ("--estimate",), "`--estimate` takes one device"),
    ],
)
def test_devices_that_are_refused(
    devices: str, more: tuple[str, ...], message: str, invoke: Invoke, model: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = invoke("compile", model, "--kl", 0.05, "--data", data, "--device", devices, "-o", out, *more)
    assert result.exit_code == 1 and message in result.stderr, result.stderr
    assert names(tmp_path) == set()


def test_why_another_bundle_is_faster() -> None:
    from moec.cli.compile_devices import device_sentences, device_table

    rows = [
        {"device": "a", "token_ns": {"a": 2_000_000, "b": 5_000_000}},
        {"device": "b", "token_ns": {"a": 1_000_000, "b": None}},
    ]
    assert device_sentences(rows, {"a": 20, "b": 10}) == [
        "on a the bundle for b is predicted to be faster, 1.00 ms against 2.00 ms: it has 10 expert bytes less; "
        "trials of both plans keep the target"
    ]
    assert "does not fit" in device_table(rows, {"a": 20, "b": 10})
