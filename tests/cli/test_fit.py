"""`moec fit`: from a config.json to a table, without torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moec.compiler.fit.estimate import Parameters, compile_outlook, measure_products
from tests.shipping.store.fake_hub import serving_hub

from .conftest import Invoke

CONFIGS = Path(__file__).parents[1] / "compiler" / "families" / "published_configs.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "Qwen3-30B-A3B"
    folder.mkdir()
    published = json.loads(CONFIGS.read_text(encoding="utf-8"))
    config = next(each["config"] for each in published if each["checkpoint"] == "Qwen/Qwen3-30B-A3B")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_devices_have_a_column_each(invoke: Invoke, model: Path) -> None:
    result = invoke("fit", model, "--device", "raspberry-pi-5-nvme,laptop", "--context", 8192)
    assert result.exit_code == 0, result.stderr
    text = result.stdout
    assert "30.53 billion: 28.99 billion in 6,144 routed experts, 1.54 billion others" in text
    assert "8,192 tokens keep 1.5 GiB" in text
    assert "raspberry-pi-5-nvme" in text and "laptop 9.3 GiB" in text
    assert f"moec compile {model} --loss 2% --data DATA --effort quick --estimate" in text
    assert re.search(r"compile +about \d+ (hours|minutes) here with --effort quick, 142\.2 GiB of free disk", text), (
        text
    )
    assert max(map(len, text.splitlines()[:-2])) <= 110


def test_this_machine_has_several_sizes_of_memory(invoke: Invoke, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moec.profiles.loading import load_profile

    laptop = load_profile("laptop")
    monkeypatch.setattr("moec.profiles.probe.probe_host", lambda storage: laptop)
    result = invoke("fit", model)
    assert result.exit_code == 0, result.stderr
    for column in ("2GiB", "4GiB", "8GiB", "16GiB", "free here 9.3 GiB", "needs 2", "measured now"):
        assert column in result.stdout


def test_memory_beyond_the_whole_model_has_no_column(
    invoke: Invoke, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moec.profiles.loading import load_profile

    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    laptop = load_profile("laptop")
    monkeypatch.setattr("moec.profiles.probe.probe_host", lambda storage: laptop)
    titles = [machine["title"] for machine in json.loads(invoke("fit", model, "--json").stdout)["machines"]]
    assert titles == ["2GiB", "4GiB"]


def test_json_has_everything(invoke: Invoke, model: Path) -> None:
    result = invoke("fit", model, "--device", "laptop", "--json")
    told = json.loads(result.stdout)
    assert told["family"] == "qwen3_moe" and told["parameters"]["experts"] == 6144 and told["context"] == 4096
    assert [row["bits"] for row in told["rows"]] == [2.3, 3.0, 4.0, 4.5, 8.0]
    outlook = told["rows"][0]["outlooks"][0]
    assert outlook["slowest"] <= outlook["tokens_per_s"] <= outlook["fastest"]
    assert told["machines"][0]["name"] == "laptop" and told["stored_bytes"] is None
    assert told["compile"]["quick_seconds"] > 60


def test_a_quick_compile_is_that_of_the_yardstick_scaled() -> None:
    """33 min 56 s and 8.7 GiB for four layers of OLMoE's shape, where 100 billion products took a second."""
    measured = compile_outlook(Parameters(1_610_612_736, 273_000_000, 0, 0, 256), 99.6e9)
    assert measured.quick_seconds == pytest.approx(2036, rel=0.02)
    assert measured.disk_bytes == pytest.approx(8.7 * 2**30, rel=0.02)
    assert 1e8 < measure_products() < 1e15


def test_refusals_are_one_sentence(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    for arguments, said in (
        ((model, "--context", 50000), "longer than the 40960 tokens of the model"),
        ((model, "--device", "toaster"), "no device profile is called `toaster`"),
        ((tmp_path / "absent",), "no folder"),
    ):
        result = invoke("fit", *arguments)
        assert result.exit_code != 0 and result.stderr.startswith("error: ")
        assert said in result.stderr and "hint: " in result.stderr and not result.stdout


def test_a_model_on_the_hub_is_described_without_its_weights(model: Path, tmp_path: Path) -> None:
    """In processes of their own, because the hub's client reads its variables once."""
    index = json.dumps({"metadata": {"total_size": 61_000_000_000}, "weight_map": {}}).encode()
    files = {"config.json": (model / "config.json").read_bytes(), "model.safetensors.index.json": index}
    with serving_hub() as hub:
        hub.repositories["owner/model"] = {"main": {**files, "model-00001-of-00001.safetensors": b"x" * 1000}}

        def fit(name: str, **more: str) -> subprocess.CompletedProcess[str]:
            variables = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HOME": str(tmp_path), **more}
            run = [sys.executable, "-m", "moec.cli.main", "fit", name, "--device", "laptop"]
            return subprocess.run(run, check=False, capture_output=True, text=True, env=variables, timeout=120)

        done = fit("owner/model")
        assert done.returncode == 0, done.stderr
        assert "30.53 billion" in done.stdout and "56.8 GiB as published" in done.stdout
        assert not list(tmp_path.rglob("*.safetensors"))
        for refused in (
            fit("owner/absent"),
            fit("owner/model2", HF_HUB_OFFLINE="1"),
            fit("owner/gated", HF_TOKEN="no"),
        ):
            assert refused.returncode and refused.stderr.startswith("error: no folder `owner/")
            assert "the hub gave no model of that name" in refused.stderr and "Traceback" not in refused.stderr


def test_torch_is_not_loaded(model: Path) -> None:
    code = (
        "import sys; from moec.cli.main import cli; cli(sys.argv[1:], standalone_mode=False);"
        "names = {name.partition('.')[0] for name in sys.modules};"
        "sys.exit(sorted(names & {'torch', 'transformers', 'datasets'}) or 0)"
    )
    run = [sys.executable, "-c", code, "fit", str(model), "--device", "laptop"]
    done = subprocess.run(run, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
