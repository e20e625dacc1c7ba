"""`expert-activations` on the command line: LOSSY with its measured price, in `mode:` lines and in sweeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moec.cli.lossy_modes.mode_sweep import ModesMeasurement
from moec.manifests.errors import OptionError
from moec.runtime import kernels
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.tuning.mode_records import measured_rows
from tests.gates.bundles import emit_bundle
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

from .conftest import Invoke

SETTING = "expert-activations bfloat16"
RUN = ("--prompt", "a", "--max-new-tokens", 2, "--lossy", "expert-activations bfloat16")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """16-bit experts."""
    folder = save_tiny_mixtral(tmp_path / "model", TinyMixtral(layers=2, experts=4, top_k=2, seed=9))
    return emit_bundle(folder, tmp_path / "wide-moec")


def test_its_price_is_measured_and_quoted(invoke: Invoke, bundle: Path) -> None:
    if not kernels.bfloat_kernels():
        pytest.skip(f"the kernels {kernels.active()} have no products of bfloat16")
    before = invoke("run", bundle, *RUN)
    assert "LOSSY (expert-activations bfloat16)" in before.stderr
    assert f'its cost was not measured: moec eval BUNDLE --data DATA --modes "{SETTING}"' in before.stderr
    data = bundle.with_name("short.jsonl")
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("A first text", "Another, longer")))
    record = json.loads(
        invoke("eval", bundle, "--data", data, "--modes", SETTING, "--expert-cache", "100%", "--json").stdout
    )
    plain, row = record["rows"]
    assert (plain["mode"], row["mode"], row["decisions"]) == ("", SETTING, None) and row["kl"]["mean"] > 0
    assert [each["mode"] for each in measured_rows(bundle)] == [SETTING]
    after = invoke("run", bundle, *RUN)
    assert "measured to cost" in after.stderr and "of perplexity on 2 items" in after.stderr
    assert "LOSSY" not in invoke("run", bundle, "--prompt", "a", "--max-new-tokens", 2).stderr
    timed = invoke("bench", bundle, "--modes", SETTING, "--tokens", 2, "--json")
    assert [each["mode"] for each in json.loads(timed.stdout)["rows"]] == ["", SETTING]


def test_kernels_that_lack_it_refuse_it_in_one_sentence(invoke: Invoke, bundle: Path) -> None:
    found = invoke("run", bundle, *RUN, "--set", "kernels=numpy", exit_code=None)
    assert found.exit_code != 0 and "the kernels `numpy` have no products of bfloat16" in found.stderr


def test_a_compile_does_not_measure_it(bundle: Path) -> None:
    with pytest.raises(OptionError, match="few processors"):
        ModesMeasurement(SETTING).check(open_bundle(bundle).manifest.model, False)
