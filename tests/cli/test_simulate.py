"""`moec simulate`: the counts of a real run, devices and overrides, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moec.cli.simulation.simulated_device import parse_time_ns
from moec.manifests.bundle import EVICTION_NAME
from moec.manifests.errors import OptionError
from moec.manifests.model import ExpertKey
from moec.profiles.device import DeviceProfile
from moec.profiles.loading import load_profile
from tests.gates.bundles import emit_bundle
from tests.listed_file import add_listed
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

from .conftest import Invoke

TEXT = "one byte of this text is one token, so it is long enough for a few dozen of them"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> DeviceProfile:
    """Use a shipped profile instead of the probe, which takes seconds."""
    profile = load_profile("laptop")
    monkeypatch.setattr("moec.profiles.probe.probe_host", lambda storage, request_bytes: profile)
    monkeypatch.setattr("moec.runtime.memory.bandwidth.read_bytes_per_s", lambda size, threads: 8_000_000_000)
    return profile


def recorded(invoke: Invoke, bundle: Path, folder: Path, *more: object) -> tuple[Path, dict[str, Any]]:
    text, trace = folder / "text.txt", folder / "run.trace"
    text.write_text(TEXT)
    arguments = ("bench", bundle, "--text", text, "--prompt-tokens", 7, "--tokens", 25, "--trace-out", trace, "--json")
    done = invoke(*arguments, *more)
    assert done.exit_code == 0, done.stderr
    return trace, json.loads(done.stdout)


def simulated(invoke: Invoke, bundle: Path, trace: Path, *more: object) -> dict[str, Any]:
    done = invoke("simulate", bundle, "--trace", trace, "--json", *more)
    assert done.exit_code == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("cache_state", ["warm", "cold"])
@pytest.mark.parametrize("policy", ["lrfu", "edgemoe", "lru", "lfu", "hobbit"])
def test_counts_are_those_of_the_run_that_was_recorded(
    invoke: Invoke, mixed_bundle: Path, host: DeviceProfile, tmp_path: Path, policy: str, cache_state: str
) -> None:
    chosen = (
        "--set",
        f"policy={policy}",
        "--expert-cache",
        "40%",
        "--set",
        "prefetch=off",
        "--set",
        f"cache-state={cache_state}",
    )
    trace, bench = recorded(invoke, mixed_bundle, tmp_path, *chosen)
    measured, told = bench["measured"], simulated(invoke, mixed_bundle, trace, *chosen)
    (row,) = told["rows"]
    for name in ("lookups", "misses", "evictions", "rereads", "bytes_read"):
        assert row[name] == measured[name] > 0, name
    assert row["tokens"] == told["recorded"]["tokens"] == measured["tokens"] == 25
    assert row["decode_bytes_read_per_token"] == pytest.approx(measured["decode_bytes_read_per_token"])
    assert told["device"]["storage_bytes_per_s"] == host.storage_bytes_per_s
    assert told["device"]["compute_scale"] == 1.0 and told["prefetch"] == "off"


def test_a_profile_scales_computing_and_brings_its_storage(
    invoke: Invoke, mixed_bundle: Path, host: DeviceProfile, tmp_path: Path
) -> None:
    trace, _ = recorded(invoke, mixed_bundle, tmp_path, "--expert-cache", "40%")
    device = load_profile("raspberry-pi-4b-sd")
    arguments = ("--profile", device.name, "--set", "policy=lru", "--expert-cache", "50%", "--set", "readers=1")
    told = simulated(invoke, mixed_bundle, trace, *arguments)
    assert told["device"]["compute_scale"] == pytest.approx(8e9 / device.memory_bytes_per_s)
    assert told["device"]["storage_latency_ns"] == device.storage_latency_ns and told["prefetch"] == "lookahead"
    assert told["device"]["cache_bytes"] > 0 and told["rows"][0]["prefetch_reads"] > 0
    slow = simulated(invoke, mixed_bundle, trace, *arguments, "--read-rate", "1MB", "--read-latency", "8ms")
    assert (slow["device"]["storage_bytes_per_s"], slow["device"]["storage_latency_ns"]) == (10**6, 8 * 10**6)
    assert slow["rows"][0]["tpot_mean_ns"] > told["rows"][0]["tpot_mean_ns"]
    assert simulated(invoke, mixed_bundle, trace, *arguments) == told, "the same again"


def test_people_get_a_table_of_budgets_and_policies(
    invoke: Invoke, mixed_bundle: Path, host: DeviceProfile, tmp_path: Path
) -> None:
    trace, _ = recorded(invoke, mixed_bundle, tmp_path, "--expert-cache", "40%")
    for prefetch in ("lookahead", "path", "popularity", "off"):
        done = invoke("simulate", mixed_bundle, "--trace", trace, "--set", f"prefetch={prefetch}")
        assert done.exit_code == 0 and "tokens/s" in done.stdout and f"prefetch  {prefetch}" in done.stdout
    assert "under the" in done.stderr and "left out" in done.stderr, "10 % is less than a layer needs"
    rows = [line.split()[:2] for line in done.stdout.splitlines() if line.strip().endswith(("B", "iB"))]
    assert {share for share, _ in rows if share.endswith("%")} == {"25%", "50%", "75%"}
    assert {name for share, name in rows if share == "50%"} == {"lrfu", "hobbit", "edgemoe", "lru", "lfu", "optimum"}


def test_all_experts_in_memory_read_nothing(
    invoke: Invoke, mixed_bundle: Path, host: DeviceProfile, tmp_path: Path
) -> None:
    trace, _ = recorded(invoke, mixed_bundle, tmp_path, "--expert-cache", "40%")
    told = simulated(invoke, mixed_bundle, trace, "--expert-cache", "100%", "--set", "policy=lru")
    assert told["rows"][0]["bytes_read"] == 0 and told["rows"][0]["stall"] == 0


def test_weights_change_what_is_kept(invoke: Invoke, mixed_bundle: Path, host: DeviceProfile, tmp_path: Path) -> None:
    trace, _ = recorded(invoke, mixed_bundle, tmp_path, "--expert-cache", "40%", "--set", "prefetch=off")
    chosen = ("--set", "policy=hobbit,lru", "--expert-cache", "40%")
    rows = simulated(invoke, mixed_bundle, trace, *chosen, "--set", "policy-weights=1,0,0,0")["rows"]
    assert rows[0]["policy"] == "hobbit" and rows[0]["misses"] == rows[1]["misses"], "recency alone is LRU"


def test_weights_of_the_bundle_are_used(invoke: Invoke, own_bundle: Path, host: DeviceProfile, tmp_path: Path) -> None:
    fitted = b'{"hobbit":{"fld":0,"lfu":0,"lhu":0,"lru":1}}'
    add_listed(own_bundle, EVICTION_NAME, fitted)
    trace, _ = recorded(invoke, own_bundle, tmp_path, "--expert-cache", "40%", "--set", "prefetch=off")
    chosen = ("--set", "policy=hobbit,lru", "--expert-cache", "40%")
    rows = simulated(invoke, own_bundle, trace, *chosen)["rows"]
    assert rows[0]["policy"] == "hobbit" and rows[0]["misses"] == rows[1]["misses"], "recency alone is LRU"


def test_what_cannot_be_replayed_is_refused(
    invoke: Invoke, bundle: Path, mixed_bundle: Path, host: DeviceProfile, tmp_path: Path
) -> None:
    trace, _ = recorded(invoke, mixed_bundle, tmp_path, "--expert-cache", "40%", "--set", "prefetch=off")
    damaged, other = tmp_path / "damaged.trace", tmp_path / "other.trace"
    damaged.write_bytes(trace.read_bytes()[:-40])
    lines = trace.read_text().splitlines()
    header = json.loads(lines[0]) | {"experts": [9, 9, 9]}
    passes = [json.dumps(json.loads(line) | {"scores": None, "prompt_scores": None}) for line in lines[1:]]
    other.write_text("\n".join([json.dumps(header), *passes]) + "\n")
    for more, message in (
        (("--trace", damaged), "line 26 is not of a routing trace: expected JSON"),
        (
            ("--trace", other),
            "of 3 layers (9 experts, top-2), the bundle has 3 layers (8 experts, top-2)",
        ),
        (("--trace", tmp_path / "none"), "cannot be read: No such file"),
        (("--set", "prefetch=lookahead"), "lacks what routers would have guessed"),
        (("--profile", "toaster"), "no device profile is called `toaster`"),
        (("--set", "readers=0"), "readers must be 1 to 32, found 0"),
        (("--read-rate", "0MB"), "`--read-rate` must be at least 1 byte"),
        (("--read-rate", "fast"), "`fast` is not a size"),
        (("--read-latency", "8"), "`8` is not a time"),
        (("--set", "policy=lru", "--set", "policy-weights=1,0,0,0"), "`policy-weights` has no effect"),
        (("--set", "policy-weights=1,1,0,0"), "is not four weights"),
        (("--expert-cache", "0%"), "is not a share of the experts"),
    ):
        refused = invoke("simulate", mixed_bundle, "--trace", trace, *more)
        assert refused.exit_code == 1 and message in refused.stderr, (more, refused.stderr)
        assert refused.stdout == ""
    other_compile = invoke("simulate", bundle, "--trace", trace, "--set", "policy=lru")
    assert other_compile.exit_code == 0 and "was recorded on another compile" in other_compile.stderr


def test_modes_are_predicted_beside_the_exact_run(
    invoke: Invoke, two_version_bundle: Path, host: DeviceProfile, tmp_path: Path
) -> None:
    bundle = two_version_bundle
    trace, _ = recorded(invoke, bundle, tmp_path, "--expert-cache", "50%")
    modes = "dynamic-precision 0,1; big-little gamma=0; cache-routing drop=1 + big-little gamma=1"
    arguments = ("--expert-cache", "50%", "--read-rate", "1MB")
    told = simulated(invoke, bundle, trace, *arguments, "--modes", modes)
    rows = {row["mode"]: row for row in told["rows"]}
    assert list(rows) == [
        "",
        "dynamic-precision 0,1",
        "big-little gamma=0,k=K/2",
        "big-little gamma=1,k=K/2 + cache-routing margin=0,drop=1",
    ]
    assert {row["policy"] for row in told["rows"]} == {"lrfu"} and rows[""]["decisions"] is None
    exact, dynamic, little, both = told["rows"]
    assert dynamic["decisions"]["low"] > 0 and dynamic["bytes_read"] < exact["bytes_read"]
    assert little["decisions"]["fallback_tokens"] == 0 and little["lookups"] < exact["lookups"]
    assert both["decisions"]["fallback_tokens"] == both["decisions"]["tokens"] == 24 and both["decisions"]["dropped"]
    assert dynamic["x_exact"] == pytest.approx(exact["tpot_mean_ns"] / dynamic["tpot_mean_ns"])
    assert dynamic["x_exact"] > 1 < little["x_exact"] and exact["x_exact"] == 1
    alone = simulated(invoke, bundle, trace, *arguments, "--set", "policy=lrfu")["rows"][0]
    assert alone == exact, "the exact row is what it was"
    done = invoke("simulate", bundle, "--trace", trace, *arguments, "--modes", "sweep")
    assert done.exit_code == 0 and "x exact" in done.stdout and "fallback" in done.stdout
    assert simulated(invoke, bundle, trace, *arguments, "--modes", modes) == told, "the same again"


def test_the_rule_of_lookahead_can_be_changed_where_the_trace_says_enough(
    invoke: Invoke, two_version_bundle: Path, host: DeviceProfile, tmp_path: Path
) -> None:
    trace, _ = recorded(invoke, two_version_bundle, tmp_path, "--expert-cache", "50%", "--set", "prefetch-layers=2")
    at_once = ("--read-rate", "900GB", "--read-latency", "0s")  # so that all advice is read
    arguments = ("--set", "policy=lru", "--expert-cache", "50%", "--expert-cache", "80%", *at_once)
    likely = simulated(invoke, two_version_bundle, trace, *arguments)
    walked = simulated(invoke, two_version_bundle, trace, *arguments, "--set", "prefetch-rule=first-miss")
    assert simulated(invoke, two_version_bundle, trace, *arguments, "--set", "prefetch-rule=likely") == likely
    assert all(row["prefetch_reads"] for row in walked["rows"])
    assert all(row["decisions"] is None and row["mode"] == "" for row in walked["rows"])
    for more, message in (
        (("--set", "prefetch=off"), "not for the prefetcher `off`"),
        (("--set", "prefetch=path"), "not for the prefetcher `path`"),
    ):
        refused = invoke("simulate", two_version_bundle, "--trace", trace, "--set", "prefetch-rule=first-miss", *more)
        assert refused.exit_code == 1 and message in refused.stderr
    walking, _ = recorded(
        invoke, two_version_bundle, tmp_path, "--expert-cache", "50%", "--set", "prefetch-rule=first-miss"
    )
    refused = invoke("simulate", two_version_bundle, "--trace", walking, "--set", "prefetch-rule=spread")
    assert refused.exit_code == 1 and "lacks what `spread` would ask" in refused.stderr


def test_layers_and_rules_change_what_is_read_ahead(
    invoke: Invoke, two_version_bundle: Path, host: DeviceProfile, tmp_path: Path
) -> None:
    """`first-miss` is decided again from fewer layers. Other rules recorded the advice of just so many layers."""
    at_once = ("--read-rate", "900GB", "--read-latency", "0s")
    arguments = ("--set", "policy=lru", "--expert-cache", "60%", "--expert-cache", "90%", *at_once)
    recording = ("--expert-cache", "50%", "--set", "prefetch-layers=2")
    walking, _ = recorded(invoke, two_version_bundle, tmp_path, *recording, "--set", "prefetch-rule=first-miss")
    two = simulated(invoke, two_version_bundle, walking, *arguments)["rows"]
    one = simulated(invoke, two_version_bundle, walking, *arguments, "--set", "prefetch-layers=1")["rows"]
    assert [row["prefetch_reads"] for row in one] != [row["prefetch_reads"] for row in two]
    refused = invoke("simulate", two_version_bundle, "--trace", walking, "--set", "prefetch-layers=3")
    assert refused.exit_code == 1 and "lacks what 3 would ask" in refused.stderr
    likely, _ = recorded(invoke, two_version_bundle, tmp_path, *recording)
    refused = invoke("simulate", two_version_bundle, "--trace", likely, "--set", "prefetch-layers=1")
    assert refused.exit_code == 1 and "by the rule `likely`, and lacks what 1 would ask" in refused.stderr


def test_advice_of_tables_follows_the_rule(
    invoke: Invoke, mixed_bundle: Path, host: DeviceProfile, tmp_path: Path
) -> None:
    """A trace of tables holds the advice of its own rule. Under another rule it is computed again."""
    recording = ("--expert-cache", "50%", "--set", "prefetch=popularity", "--set", "prefetch-rule=spread")
    trace, _ = recorded(invoke, mixed_bundle, tmp_path, *recording)
    arguments = ("--set", "policy=lru", "--expert-cache", "60%", "--read-rate", "900GB", "--read-latency", "0s")
    reads = {
        setting: simulated(invoke, mixed_bundle, trace, *arguments, "--set", setting)["rows"][0]["prefetch_reads"]
        for setting in ("prefetch-rule=spread", "prefetch-rule=until-routed")
    }
    assert len(set(reads.values())) == 2, reads


def test_modes_that_the_trace_cannot_decide_are_refused(
    invoke: Invoke, two_version_bundle: Path, mixed_bundle: Path, host: DeviceProfile, tmp_path: Path
) -> None:
    trace, _ = recorded(invoke, two_version_bundle, tmp_path, "--expert-cache", "50%")
    first, *passes = map(json.loads, trace.read_text().splitlines())

    def changed(**scores: Any) -> Path:
        path = tmp_path / "changed.trace"
        lines = [each | {"scores": each["scores"] and {**each["scores"], **scores}} for each in passes]
        path.write_text("\n".join(map(json.dumps, [first, *lines])) + "\n")
        return path

    bare = tmp_path / "bare.trace"
    lines = [each | {"scores": None, "prompt_scores": None} for each in passes]
    bare.write_text("\n".join(map(json.dumps, [first, *lines])) + "\n")
    old = tmp_path / "old.trace"
    old.write_text("\n".join(map(json.dumps, [first | {"version": 4}, *lines])) + "\n")
    for path, more, message in (
        (bare, ("--modes", "cache-routing drop=0.5"), "has not recorded: the scores of routers"),
        (old, (), "expected version 5, found 4"),
        (
            changed(confidence=None, little_logits=""),
            ("--modes", "big-little gamma=0.5"),
            "the confidence of the little model",
        ),
        (trace, ("--modes", "big-little gamma=0.5,k=1"), "a little model of this size"),
        (trace, ("--modes", "big-little gamma=0.5", "--set", "policy=optimum"), "knows the future"),
        (trace, ("--modes", "magic 1"), "`magic 1` is not a mode"),
    ):
        refused = invoke("simulate", two_version_bundle, "--trace", path, *more)
        assert refused.exit_code == 1 and message in refused.stderr, (more, refused.stderr)
        assert refused.stdout == ""
    assert invoke("simulate", two_version_bundle, "--trace", bare).exit_code == 0


def test_a_trace_that_cannot_be_written_is_refused(
    invoke: Invoke, mixed_bundle: Path, host: DeviceProfile, tmp_path: Path
) -> None:
    arguments = ("bench", mixed_bundle, "--tokens", 3, "--prompt", "Hello", "--expert-cache", "40%")
    (tmp_path / "file").touch()
    refused = invoke(*arguments, "--trace-out", tmp_path / "file" / "a.trace")
    assert refused.exit_code == 1 and "cannot be written" in refused.stderr


@pytest.mark.parametrize(("text", "expected"), [("150us", 150_000), ("8ms", 8_000_000), ("0s", 0), ("1.5 ms", 1500000)])
def test_times(text: str, expected: int) -> None:
    assert parse_time_ns(text) == expected


@pytest.mark.parametrize("text", ["", "8", "ms", "-1ms", "1e3us", "8m", "\u0668ms"])
def test_not_a_time(text: str) -> None:
    with pytest.raises(OptionError, match="is not a time"):
        parse_time_ns(text)


def test_the_little_model_of_a_trace_must_be_there(invoke: Invoke, mixed_bundle: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    bench = ("bench", mixed_bundle, "--text", text, "--prompt-tokens", 7, "--tokens", 9)
    for given, told in [
        (("--trace-out", tmp_path / "t", "--trace-little", "9"), "a little model of 9 experts is the whole one"),
        (("--trace-out", tmp_path / "t", "--trace-little", "few"), "`--trace-little few` is not a number of experts"),
        (("--trace-little", "1"), "`--trace-little` has no effect without a trace"),
    ]:
        done = invoke(*bench, *given)
        assert done.exit_code == 1 and told in done.stderr and not (tmp_path / "t").exists()


def test_an_accelerator_holds_the_most_popular_experts(
    invoke: Invoke, mixed_bundle: Path, host: DeviceProfile, tmp_path: Path
) -> None:
    trace, _ = recorded(invoke, mixed_bundle, tmp_path, "--expert-cache", "40%")
    arguments = ("--set", "policy=lru", "--expert-cache", "40%", "--read-rate", "1MB")
    alone = simulated(invoke, mixed_bundle, trace, *arguments)
    assert alone["device"]["accelerator"] is None and alone["rows"][0]["experts"] is None
    times = "expert=5us,token=100ns,link=12GB"
    there = ("--accelerator", f"memory=1GiB,{times}", "--set", "cooperation=cpu")
    whole = simulated(invoke, mixed_bundle, trace, *arguments, *there)
    (row,), (before,) = whole["rows"], alone["rows"]
    assert row["experts"]["resident"] > 0 and row["experts"]["copied"] == row["experts"]["cpu"] == 0
    assert row["bytes_read"] == 0 < before["bytes_read"] and row["tpot_mean_ns"] < before["tpot_mean_ns"]
    done = invoke("simulate", mixed_bundle, "--trace", trace, "--accelerator", f"memory=1GiB,{times}")
    assert done.exit_code == 0 and "cooperation auto, CPU" in done.stdout and "of 24 experts on it" in done.stdout
    little = invoke("simulate", mixed_bundle, "--trace", trace, "--accelerator", f"memory=1KiB,{times}")
    assert little.exit_code != 0 and "is under its floor of" in little.stderr
    assert "raise `memory` of `--accelerator`" in little.stderr
    lost = invoke("simulate", mixed_bundle, "--trace", trace, "--set", "cooperation=gpu")
    assert lost.exit_code == 1 and "has no effect without a device" in lost.stderr


def test_the_gpu_of_a_profile_brings_its_memory_and_its_link(
    invoke: Invoke, mixed_bundle: Path, host: DeviceProfile, tmp_path: Path
) -> None:
    trace, _ = recorded(invoke, mixed_bundle, tmp_path, "--expert-cache", "40%")
    arguments = ("--set", "policy=lru", "--expert-cache", "40%", "--profile", "quadro-rtx-6000-host")
    gpu = load_profile("quadro-rtx-6000-host").gpu
    assert gpu is not None
    short = simulated(invoke, mixed_bundle, trace, *arguments, "--accelerator", "expert=5us")
    stated = f"memory={gpu.memory_bytes},expert=5us,link={gpu.link_bytes_per_s}"
    assert short == simulated(invoke, mixed_bundle, trace, *arguments, "--accelerator", stated)
    link = simulated(invoke, mixed_bundle, trace, *arguments, "--accelerator", "expert=5us,link=1GB")
    assert link["device"]["accelerator"]["latency"]["link_ns_per_byte"] == 1.0, "the option comes before the profile"
    for profile, missing in (("xiaomi-14", "does not say link"), ("laptop", "does not say memory, link")):
        shared = ("--profile", profile, "--accelerator", "expert=5us")
        refused = invoke("simulate", mixed_bundle, "--trace", trace, *shared)
        assert refused.exit_code == 1 and missing in refused.stderr


def test_energy_is_told_where_the_profile_states_a_draw(
    invoke: Invoke, mixed_bundle: Path, host: DeviceProfile, tmp_path: Path
) -> None:
    trace, _ = recorded(invoke, mixed_bundle, tmp_path, "--expert-cache", "40%")
    arguments = ("--set", "policy=lru", "--expert-cache", "40%")
    told = simulated(invoke, mixed_bundle, trace, *arguments, "--profile", "raspberry-pi-4b-sd")
    (row,), power = told["rows"], told["device"]["power"]
    watts = (1 - row["stall"]) * power["load_watts"] + row["stall"] * power["idle_watts"]
    assert row["joules_per_token"] == pytest.approx(watts * row["tpot_mean_ns"] / 1e9) and 0 < row["stall"] < 1
    done = invoke("simulate", mixed_bundle, "--trace", trace, *arguments, "--profile", "raspberry-pi-4b-sd")
    assert "power     6.4 W computing, 2.7 W waiting, as the profile states" in done.stdout
    assert "energy" in done.stdout and " mJ" in done.stdout
    silent = simulated(invoke, mixed_bundle, trace, *arguments, "--profile", "laptop")
    assert silent["device"]["power"] is None and silent["rows"][0]["joules_per_token"] is None
    done = invoke("simulate", mixed_bundle, "--trace", trace, *arguments, "--profile", "rtx-4090-host")
    assert done.exit_code == 0 and "energy" not in done.stdout, "the draw of its processor is not stated"
    there = ("--profile", "rtx-4080-host", "--accelerator", "expert=5us")
    done = invoke("simulate", mixed_bundle, "--trace", trace, *arguments, *there)
    assert "power        117 W computing, 320 W of the GPU, as the profile states" in done.stdout


def test_a_trace_that_asks_for_what_the_bundle_leaves_out_is_refused(
    invoke: Invoke, host: DeviceProfile, tmp_path: Path
) -> None:
    folder = save_tiny_mixtral(tmp_path / "model", TinyMixtral(layers=2, experts=6, top_k=2, seed=3))
    whole = emit_bundle(folder, tmp_path / "whole", bitwidth=4)
    trace, _ = recorded(invoke, whole, tmp_path, "--expert-cache", "50%")
    asked = json.loads(trace.read_text().splitlines()[-1])["chosen"][1][0]
    part = emit_bundle(folder, tmp_path / "part", bitwidth=4, pruned=(ExpertKey(1, asked),))
    done = invoke("simulate", part, "--trace", trace)
    assert done.exit_code != 0 and f"chooses expert {asked} of layer 1, which the bundle leaves out" in done.stderr
    assert invoke("simulate", whole, "--trace", trace, "--set", "policy=lru").exit_code == 0
