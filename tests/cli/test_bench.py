"""`moec bench` and `moec profile-device`: ceiling, measurement, ratio, the comparison of policies, and a profile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moec.cli.main import cli
from moec.cli.measuring.ceiling import predict, run_ceiling_ns
from moec.profiles.device import DeviceProfile
from moec.profiles.loading import load_profile
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.expert_cache.policies import SCORES
from moec.runtime.trace.statistics import DecodeShares, RunRecorder
from moec.runtime.trace.trace import TraceRecorder

from .conftest import Invoke


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> DeviceProfile:
    """Use a shipped profile instead of the probe, which takes seconds."""
    profile = load_profile("raspberry-pi-4b-sd")
    monkeypatch.setattr("moec.profiles.probe.probe_host", lambda storage, request_bytes: profile)
    monkeypatch.setattr("moec.runtime.memory.bandwidth.read_bytes_per_s", lambda size, threads: 8_000_000_000)
    return profile


def test_ceiling_first_then_measurement_then_ratio(invoke: Invoke, mixed_bundle: Path, host: DeviceProfile) -> None:
    result = invoke("bench", mixed_bundle, "--tokens", 6, "--expert-cache", "40%", "--prompt", "Hello")
    assert result.exit_code == 0, result.stderr
    places = [result.stdout.index(part) for part in ("ceiling", "mode: streaming", "per token (TPOT)", "ratio  ")]
    assert places == sorted(places)


def test_json_holds_all_of_it(invoke: Invoke, mixed_bundle: Path, host: DeviceProfile) -> None:
    arguments = ("bench", mixed_bundle, "--tokens", 10, "--expert-cache", "50%", "--prompt", "Hello", "--json")
    values = json.loads(invoke(*arguments, "--policies", "all").stdout)
    ceiling, measured = values["ceiling"], values["measured"]
    assert measured["tokens"] == 10 and measured["prompt_tokens"] == 5
    read = measured["decode_bytes_read_per_token"]
    own_rate = read * measured["tokens_per_s"] / measured["decode_shares"]["storage_busy"]
    read_ns = read / max(own_rate, values["host"]["storage_bytes_per_s"]) * 1e9
    assert ceiling["run_ns"] == pytest.approx(max(ceiling["compute_ns"], read_ns), rel=1e-6, abs=2) and read_ns > 0
    assert values["ratio"] == pytest.approx(ceiling["run_ns"] * measured["tokens_per_s"] / 1e9)
    assert ceiling["tpot_ns"] == max(ceiling["compute_ns"], ceiling["storage_ns"]) > 0
    assert ceiling["is_calibrated"] == bool(open_bundle(mixed_bundle).tables().popularity.any())
    rows = values["policies"]
    assert {row["policy"] for row in rows} == {*SCORES, "popularity", "optimum"}
    for share in {row["share"] for row in rows}:
        part = {row["policy"]: row for row in rows if row["share"] == share}
        assert part["optimum"]["lookups"] == measured["lookups"]
        assert part["optimum"]["misses"] <= min(row["misses"] for row in part.values()) + 2  # sizes differ a little


@pytest.mark.parametrize(
    "read, busy, expected_ns",
    [
        (0, 0.0, 500),  # no reads: compute time
        (4_000, 0.5, 2_000),  # 4 kB at the 2 GB/s of the probe
        (4_000, 0.125, 1_000),  # 4 GB/s during the run
    ],
)
def test_the_ceiling_of_a_run_is_what_storage_gives_for_what_it_read(read: int, busy: float, expected_ns: int) -> None:
    host = replace(load_profile("laptop"), storage_bytes_per_s=2_000_000_000)
    run = replace(
        RunRecorder(1).finish(),
        tokens_per_s=125_000.0,
        decode_bytes_read_per_token=float(read),
        decode_shares=DecodeShares(0.0, 0.0, 0.0, 1.0, busy),
    )
    assert run_ceiling_ns({"compute_ns": 500}, host, run) == expected_ns


def test_storage_is_asked_for_as_much_at_once_as_the_largest_expert_has(
    invoke: Invoke, mixed_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def probed(storage: Path, request_bytes: int) -> DeviceProfile:
        asked.append(request_bytes)
        return load_profile("laptop")

    monkeypatch.setattr("moec.profiles.probe.probe_host", probed)
    assert invoke("bench", mixed_bundle, "--tokens", 2).exit_code == 0
    assert asked == [max(entry.size_bytes for entry in open_bundle(mixed_bundle).manifest.experts)]


def test_passes_are_noted_only_for_who_reads_them(
    invoke: Invoke, mixed_bundle: Path, host: DeviceProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording a trace takes a part of the measured time."""
    noted, add_layer = list[int](), TraceRecorder.add_layer

    def counted(recorder: TraceRecorder, layer: int, *rest: Any) -> None:
        noted.append(layer)
        add_layer(recorder, layer, *rest)

    monkeypatch.setattr(TraceRecorder, "add_layer", counted)
    arguments = ("bench", mixed_bundle, "--tokens", 4, "--expert-cache", "50%", "--prompt", "Hello")
    assert invoke(*arguments).exit_code == 0 and not noted
    assert invoke(*arguments, "--policies", "all").exit_code == 0 and noted


def test_advice_is_told_layer_by_layer(invoke: Invoke, mixed_bundle: Path, host: DeviceProfile) -> None:
    arguments = ("bench", mixed_bundle, "--tokens", 12, "--expert-cache", "50%", "--prompt", "Hello")
    values = json.loads(invoke(*arguments, "--json").stdout)
    layers, measured = values["prefetch_by_layer"], values["measured"]
    assert [each["layer"] for each in layers] == list(range(open_bundle(mixed_bundle).manifest.model.num_layers))
    assert sum(each["demanded"] for each in layers) <= measured["lookups"]
    demanded, predicted = (sum(each[name] for each in layers) for name in ("demanded", "predicted"))
    assert demanded and measured["prefetch_recall"] == pytest.approx(predicted / demanded)
    read, used = (sum(each[name] for each in layers) for name in ("read", "used"))
    assert measured["prefetch_reads"] <= read and used <= read
    assert "read ahead" in invoke(*arguments).stdout


def test_a_profile_divides_a_token_among_kernels_waiting_and_python(
    invoke: Invoke, mixed_bundle: Path, host: DeviceProfile
) -> None:
    asked = ("bench", mixed_bundle, "--tokens", 9, "--expert-cache", "50%", "--profile")
    told = json.loads(invoke(*asked, "--json").stdout)
    rows = {row["part"]: row for row in told["profile"]}
    assert rows["attend"]["calls_per_token"] == 3 and rows["dequantize_rows"]["calls_per_token"] == 1
    assert rows["experts_layer"]["calls_per_token"] == 3
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    total_ns = 1e9 / told["measured"]["tokens_per_s"]
    assert rows["waiting for experts"]["share"] == pytest.approx(told["measured"]["decode_shares"]["stall"])
    assert 0 < rows["Python and numpy"]["ns_per_token"] < total_ns
    assert all(0 < row["ns_per_token"] < total_ns for name, row in rows.items() if name != "waiting for experts")
    page = invoke(*asked).stdout
    assert "of a token" in page and "Python and numpy" in page
    assert "profile" not in json.loads(invoke("bench", mixed_bundle, "--tokens", 3, "--json").stdout)
    refused = invoke(*asked, "--modes", "sweep")
    assert refused.exit_code == 1 and "is of one run" in refused.stderr


def test_people_get_the_table_of_policies(invoke: Invoke, mixed_bundle: Path, host: DeviceProfile) -> None:
    result = invoke("bench", mixed_bundle, "--tokens", 4, "--expert-cache", "50%", "--policies", "all")
    assert result.exit_code == 0 and "x optimum" in result.stdout and "popularity" in result.stdout


def test_the_ceiling_counts_what_a_token_moves(bundle: Path, host: DeviceProfile) -> None:
    opened = open_bundle(bundle)
    manifest = opened.manifest
    resident = predict(opened, host, manifest.cost.expert_padded_bytes)
    assert resident["missed_bytes_per_token"] == 0 and resident["reads_per_token"] == 0
    embedding = next(entry for entry in manifest.dense if entry.name == "embedding")
    without_rows = (embedding.shape[0] - 1) * embedding.spec.row_bytes(embedding.shape[1])
    expected = manifest.cost.dense_packed_bytes - without_rows + manifest.cost.expected_read_bytes_per_token
    assert resident["compute_bytes_per_token"] == pytest.approx(expected, rel=1e-3)
    half = predict(opened, host, manifest.cost.expert_padded_bytes // 2)
    assert half["missed_bytes_per_token"] == pytest.approx(manifest.cost.expected_read_bytes_per_token / 2, rel=0.05)


def test_what_does_not_fit_is_refused(invoke: Invoke, bundle: Path, host: DeviceProfile) -> None:
    result = invoke("bench", bundle, "--tokens", 500)
    assert result.exit_code == 1 and "exceed the context of 128" in result.stderr
    assert invoke("bench", bundle, "--tokens", 1).exit_code == 1


def test_a_text_is_measured_token_by_token(
    invoke: Invoke, mixed_bundle: Path, host: DeviceProfile, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one byte of this text is one token")
    arguments = ("bench", mixed_bundle, "--text", text, "--prompt-tokens", 7, "--tokens", 9, "--expert-cache", "40%")
    values = json.loads(invoke(*arguments, "--json").stdout)
    assert (values["measured"]["prompt_tokens"], values["measured"]["tokens"]) == (7, 9)
    assert values["host"]["memory_bytes_per_s"] == 8_000_000_000
    shares = values["measured"]["decode_shares"]
    assert sum(shares[name] for name in ("stall", "experts", "dense", "other")) == pytest.approx(1)
    assert min(shares["experts"], shares["dense"]) > 0 and 0 <= shares["storage_busy"] <= 1
    result = invoke(*arguments)
    assert "time of decode" in result.stdout and "experts" in result.stdout
    for more, message in (
        (("--tokens", 500), "34 tokens, 7 and 500 are needed"),
        (("--prompt-tokens", 0), "`--prompt-tokens` must be at least 1"),
        (("--context", 8), "the context holds 8"),
        (("--text", tmp_path / "none.txt"), "cannot be read as UTF-8 text"),
    ):
        refused = invoke(*arguments, *more)
        assert refused.exit_code == 1 and message in refused.stderr


def test_the_file_is_a_profile(tmp_path: Path) -> None:
    target = tmp_path / "board.toml"
    arguments = ["profile-device", "-o", str(target), "--name", "board", "--storage", str(tmp_path), "--json"]
    done = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert done.exception is None
    profile = load_profile(target)
    assert profile.name == "board" and not profile.is_probed and profile.storage_bytes_per_s > 1_000_000
    assert all(text.startswith("measured: ") for text in profile.provenance.values())
    told = json.loads(done.stdout)
    assert told["sha256"] == profile.sha256 and told["threads"] == profile.threads

    before = target.read_bytes()
    again = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert "there already" in str(again.exception) and target.read_bytes() == before


def test_a_bad_name_is_refused(tmp_path: Path) -> None:
    arguments = ["profile-device", "--name", "My Board", "--storage", str(tmp_path)]
    done = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert "lower-case" in str(done.exception)
