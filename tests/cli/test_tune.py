"""Tuning: the options that are faster are kept, files of others are ignored, and weights are fitted."""

from __future__ import annotations

import json
import math
import os
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from moec.cli.commands.measuring import tune
from moec.cli.main import cli
from moec.cli.options.opening import open_engine
from moec.cli.options.tuned_options import planned_cache_bytes
from moec.cli.simulation.compile_eviction import EvictionReplays, fit_to_texts, requests_of
from moec.cli.simulation.traces import replayed_bundle
from moec.cli.terminal.output import human_bytes
from moec.compiler.request.ports import RoutedText
from moec.manifests.errors import MoecError
from moec.profiles.probe import machine_sha256, storage_sha256
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.engine.engine import Engine, load
from moec.runtime.expert_cache.policies import DEFAULT_WEIGHTS
from moec.runtime.memory.budget import plan_memory
from moec.runtime.options.runtime import EvictionWeights, RuntimeOptions, parse_cache
from moec.runtime.tuning.tune_file import Tuning, bundle_sha256, read_tuning, tuning_path, write_tuning


@pytest.fixture
def bundle(mixed_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mixed_bundle, tmp_path / "bundle"))


def call(arguments: list[str]) -> Result:
    """Call `moec`. An error is the exception of the result."""
    return CliRunner().invoke(cli, arguments, standalone_mode=False)


def tuning_of(bundle: Path, options: dict[str, str | int], cache: str = "50%") -> Tuning:
    """Return the tuning that `moec tune --expert-cache 50%` would write here."""
    cache_bytes = parse_cache(cache, open_bundle(bundle).manifest.cost.expert_padded_bytes)
    return Tuning(machine_sha256(), storage_sha256(bundle), bundle_sha256(bundle), cache_bytes, options)


def slower(**slow: float) -> Callable[[RuntimeOptions], float]:
    """Return the seconds per token of some options, from given factors."""

    def seconds(options: RuntimeOptions) -> float:
        factor = 1.0
        for name, change in slow.items():
            option, _, value = name.rpartition("_")
            factor *= change if str(getattr(options, option)) == value else 1.0
        return factor

    return seconds


def test_what_pays_by_three_percent_is_kept() -> None:
    options = RuntimeOptions(threads=2)
    best, trials = tune.search(options, 8, slower(prefetch_off=0.96, readers_4=0.98, threads_1=1.5))
    assert best == replace(options, prefetch="off")
    assert {(t["option"], t["value"]) for t in trials if t["kept"]} == {("prefetch", "off")}
    assert {t["option"] for t in trials} == {"prefetch", "readers", "threads"}, "what prefetching is off needs no depth"


def test_depth_and_rank_of_the_lookahead_are_chosen_by_measurement() -> None:
    options = RuntimeOptions(threads=1)
    best, trials = tune.search(
        options, 8, slower(prefetch_layers_3=0.9, prefetch_experts_4=0.95, prefetch_experts_8=2.0)
    )
    assert best == replace(options, prefetch_layers=3, prefetch_experts=4, prefetch_rule="spread")
    assert [t["value"] for t in trials if t["option"] == "prefetch_experts"] == [2, 4, 8]
    assert [t["value"] for t in trials if t["option"] == "prefetch_layers"] == [1, 3]


def test_the_rule_of_the_lookahead_is_chosen_by_measurement() -> None:
    options = RuntimeOptions(threads=1)
    best, trials = tune.search(options, 8, slower(**{"prefetch_rule_first-miss": 0.95, "prefetch_layers_3": 0.9}))
    assert best == replace(options, prefetch_rule="first-miss", prefetch_layers=3)
    assert [t["value"] for t in trials if t["option"] == "prefetch_rule"] == ["spread", "first-miss", "until-routed"]
    assert tune.search(options, 8, slower(**{"prefetch_rule_first-miss": 0.98}))[0] == options


def test_an_option_is_measured_with_what_it_needs() -> None:
    own_reader = RuntimeOptions(threads=1, prefetch_rule="until-routed", reader_cpus=str(min(os.sched_getaffinity(0))))
    best, _ = tune.search(own_reader, 8, slower(prefetch_experts_4=0.95))
    assert best == replace(own_reader, prefetch_experts=4, prefetch_rule="spread", reader_cpus=None)
    assert tune.search(own_reader, 8, slower(prefetch_layers_3=0.95))[0].reader_cpus == own_reader.reader_cpus


def test_one_lucky_turn_is_not_enough() -> None:
    turns = iter(range(10_000))

    def seconds(options: RuntimeOptions) -> float:
        return 0.5 if options.readers == 4 and next(turns) == 0 else 1.0

    assert tune.search(RuntimeOptions(threads=1), 8, seconds)[0] == RuntimeOptions(threads=1)


def test_the_file_lies_beside_the_bundle_and_is_used(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moec.cli.commands.measuring.tune.ROUNDS", 1)
    before = sorted(path.name for path in bundle.iterdir())
    done = call(["tune", str(bundle), "--expert-cache", "50%", "--tokens", "3", "--json"])
    assert done.exception is None
    told = json.loads(done.stdout)
    assert Path(told["path"]) == tmp_path / "bundle.tune.json" == tuning_path(bundle)
    assert sorted(path.name for path in bundle.iterdir()) == before
    found = read_tuning(bundle)
    assert found is not None and found.trials == told["trials"] and len(found.trials) >= 4
    assert replace(found, options={}, trials=[]) == tuning_of(bundle, {}) and told["expert_cache_bytes"] > 0

    write_tuning(bundle, replace(found, options={"readers": 5, "prefetch": "path"}))
    assert "prefetch path" in mode(bundle) and "readers 5" in mode(bundle)
    assert "readers 1" in mode(bundle, "--set", "readers=1"), "the command line comes first"


def test_no_engine_takes_memory_from_the_next(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[weakref.ref[Engine]] = []

    def open_alone(*asked: Any) -> Engine:
        assert [engine for engine in opened if engine() is not None] == []
        engine = open_engine(*asked)
        opened.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(tune, "open_engine", open_alone)
    monkeypatch.setattr(tune, "ROUNDS", 1)
    monkeypatch.setattr(tune, "LEAST_GAIN", math.inf)  # keep no option, so that every alternative is measured
    arguments = ["tune", str(bundle), "--expert-cache", "50%", "--tokens", "2"]
    assert call(arguments).exception is None
    found = read_tuning(bundle)
    assert found is not None and len(found.trials) >= 4
    assert len(opened) == 2 * len(found.trials)


def mode(bundle: Path, *more: str, cache: tuple[str, str] = ("--expert-cache", "50%")) -> str:
    arguments = ["run", str(bundle), "--prompt", "ab", "--max-new-tokens", "1", *cache, *more]
    done = call(arguments)
    assert done.exception is None
    return done.stderr


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("machine", "was made on another machine"),
        ("storage", "was made on other storage than that of the bundle"),
        ("bundle", "was made for another compile of the bundle"),
    ],
)
def test_a_file_for_something_else_is_named_and_left_aside(bundle: Path, field: str, reason: str) -> None:
    write_tuning(bundle, replace(tuning_of(bundle, {"readers": 5}), **{field: "0" * 64}))
    told = mode(bundle)
    assert f"warning: `{tuning_path(bundle)}` {reason}; it is ignored, `moec tune` makes a new one" in told
    assert "readers 2" in told


def test_a_file_for_another_size_of_cache_is_named_and_left_aside(bundle: Path) -> None:
    tuning = tuning_of(bundle, {"readers": 5})
    write_tuning(bundle, tuning)
    for near in ("41%", "59%"):
        told = mode(bundle, cache=("--expert-cache", near))
        assert "readers 5" in told and "warning" not in told
    sizes = {share: human_bytes(tuning_of(bundle, {}, share).expert_cache_bytes) for share in ("39%", "50%", "61%")}
    for far in ("39%", "61%"):
        told = mode(bundle, cache=("--expert-cache", far))
        assert f"was made with an expert cache of {sizes['50%']}, this run has {sizes[far]}; it is ignored" in told
        assert f"`moec tune {bundle} --expert-cache {far}` makes a new one" in told and "readers 2" in told


def test_the_size_of_a_cache_that_a_budget_leaves_counts(bundle: Path) -> None:
    write_tuning(bundle, tuning_of(bundle, {"readers": 5}, "100%"))
    assert "readers 5" in mode(bundle, cache=("--memory", "2GiB")), "all experts fit"
    write_tuning(bundle, tuning_of(bundle, {"readers": 5}))
    told = mode(bundle, cache=("--memory", "2GiB"))
    assert f"--expert-cache {tuning_of(bundle, {}, '100%').expert_cache_bytes}` makes" in told and "readers 2" in told


def test_a_sweep_of_modes_has_a_cache_of_its_own(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "one item of some text"}\n')
    arguments = ["eval", str(bundle), "--data", str(tmp_path / "data.jsonl"), "--modes", "big-little gamma=0,k=1"]
    for cache, is_left in (("25%", False), ("100%", True)):
        write_tuning(bundle, tuning_of(bundle, {"readers": 5}, cache))
        done = call(arguments)
        assert done.exception is None and ("is ignored" in done.stderr) == is_left
        assert ("readers 5" in done.stderr) != is_left


def test_what_the_rest_of_a_budget_does_not_use_yet_counts(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.runtime.memory.budget.resident_set_bytes", lambda: 64 << 20)
    budget = str(plan_memory(open_bundle(bundle).manifest, RuntimeOptions(memory="2GiB")).floor_bytes)
    with load(bundle, memory=budget) as engine:
        cache_bytes = engine.decoding_cache_bytes(0)
    assert planned_cache_bytes(bundle, RuntimeOptions(memory=budget)) == cache_bytes > 1.25 * engine.memory.cache_bytes
    write_tuning(bundle, replace(tuning_of(bundle, {"readers": 5}), expert_cache_bytes=cache_bytes))
    assert "readers 5" in mode(bundle, cache=("--memory", budget))
    assert "readers 5" in mode(bundle, "--context", "64", cache=("--memory", budget)), "what a long text takes is free"
    told = mode(bundle, cache=("--expert-cache", str(engine.memory.cache_bytes)))
    assert "is ignored" in told and "readers 2" in told, "a budget gives more than it promises"


def test_the_cache_is_planned_beside_the_slots_of_the_run(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.runtime.memory.budget.resident_set_bytes", lambda: 64 << 20)
    budget = str(plan_memory(open_bundle(bundle).manifest, RuntimeOptions(memory="2GiB")).floor_bytes)
    one, four = (planned_cache_bytes(bundle, RuntimeOptions(memory=budget, slots=slots)) for slots in (1, 4))
    assert four == one, "slots that do not fit give way"
    asked: list[int] = []

    def planned(folder: Path, options: RuntimeOptions) -> int:
        asked.append(options.slots)
        return planned_cache_bytes(folder, options)

    monkeypatch.setattr("moec.cli.options.tuned_options.planned_cache_bytes", planned)
    write_tuning(bundle, tuning_of(bundle, {"readers": 5}))
    assert "readers 5" in mode(bundle, "--beams", "3")
    assert asked == [3]


def damaged(options: object, **fields: object) -> str:
    whole = {"format_version": 1, "machine": "", "storage": "", "bundle": "", "expert_cache_bytes": 1, "trials": []}
    return json.dumps({**whole, "options": options, **fields})


WITHOUT_STORAGE = (
    '{"format_version": 1, "machine": "", "bundle": "", "expert_cache_bytes": 1, "options": {}, "trials": []}'
)
WITHOUT_CACHE = '{"format_version": 1, "machine": "", "storage": "", "bundle": "", "options": {}, "trials": []}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[]", "is not of version 1"),
        ('{"format_version": 2}', "is not of version 1"),
        (WITHOUT_STORAGE, "lacks a field"),
        (WITHOUT_CACHE, "lacks a field"),
        (damaged([]), "lacks a field"),
        (damaged({}, trials=[1]), "has trials that are no list"),
        (damaged({}, expert_cache_bytes="1"), "has an expert cache of no size"),
        (damaged({}, expert_cache_bytes=True), "has an expert cache of no size"),
        (damaged({}, expert_cache_bytes=-1), "has an expert cache of no size"),
        (damaged({"io": "mmap"}), "has the option `io`"),
        (damaged({"readers": True}), "has the option `readers`"),
        (damaged({"prefetch": "magic"}), "has the option `prefetch`"),
        (damaged({"prefetch_rule": "all"}), "has the option `prefetch_rule`"),
        (damaged({"policy": "fifo"}), "has the option `policy`"),
        (damaged({"policy_weights": "1,0,0,0"}), "has weights of a policy that takes none"),
        (damaged({"policy": "hobbit", "policy_weights": "1"}), "has the option `policy_weights`"),
    ],
)
def test_a_damaged_file_is_left_aside(bundle: Path, text: str, message: str) -> None:
    tuning_path(bundle).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_tuning(bundle)
    told = mode(bundle)
    assert "warning" in told and message in told and "`moec tune` makes a new one" in told


def traced(bundle: Path, folder: Path, name: str, text: str) -> Path:
    source, trace = folder / f"{name}.txt", folder / f"{name}.trace"
    source.write_text(text)
    arguments = ["bench", str(bundle), "--text", str(source), "--prompt-tokens", "4", "--tokens", "20"]
    arguments += ["--expert-cache", "40%", "--trace-out", str(trace)]
    assert call(arguments).exception is None
    return trace


@pytest.mark.usefixtures("laptop")
def test_weights_are_fitted_and_compared_on_other_traces(bundle: Path, tmp_path: Path) -> None:
    training = traced(bundle, tmp_path, "a", "this text is what the weights are fitted to")
    held_out = [traced(bundle, tmp_path, name, f"{name} is another text, for comparing them") for name in "bc"]
    write_tuning(bundle, tuning_of(bundle, {"readers": 5, "policy": "lfu"}))
    arguments = ["tune", str(bundle), "--expert-cache", "50%", "--trace", str(training)]
    for path in held_out:
        arguments += ["--held-out", str(path)]
    done = call([*arguments, "--json"])
    assert done.exception is None
    told = json.loads(done.stdout)
    policies = ["lrfu", "lru", "lfu", "edgemoe", "popularity", "optimum", "hobbit", "hobbit-printed"]
    by_size: dict[int, dict[str, dict[str, object]]] = {}
    for row in told["rows"]:
        by_size.setdefault(row["capacity_bytes"], {})[row["policy"]] = row
    assert len(by_size) == 3, "10 % is less than a layer needs, 50 % is in use"
    for part in by_size.values():
        assert list(part) == policies
        best = part[str(part["lru"]["best"])]
        assert best["ratio"] == 1 and best["interval"] == [1, 1]
        plain = [part[name]["worst"] for name in ("lru", "lfu", "edgemoe", "popularity")]
        assert min(plain) >= 1 and part["optimum"]["worst"] <= min(plain) <= 1.5, "the best of each trace is 1 there"
        assert part["lru"]["gap_closed"] in (0, None) and part["optimum"]["gap_closed"] in (1, None)
        assert part["hobbit"]["weights"] and part["lru"]["weights"] is None
    found = read_tuning(bundle)
    assert found is not None and found.options["readers"] == 5, "what timing found stays"
    assert found.options == told["options"] and found.trials == told["trials"]
    kept = [trial for trial in told["trials"] if trial["kept"]]
    assert found.options.get("policy") == (kept[0]["value"].split()[0] if kept else None)
    table = call(arguments)
    assert table.exception is None and "gap closed" in table.stdout
    write_tuning(bundle, tuning_of(bundle, {"readers": 5}, "30%"))
    assert call(arguments).exception is None
    found = read_tuning(bundle)
    assert found is not None and "readers" not in found.options, "what paid in another cache does not stay"
    assert found.expert_cache_bytes == tuning_of(bundle, {}).expert_cache_bytes


@pytest.mark.usefixtures("laptop")
def test_weights_are_fitted_to_what_a_lossy_mode_decides(two_version_bundle: Path, tmp_path: Path) -> None:
    training = traced(two_version_bundle, tmp_path, "a", "this text is what the weights are fitted to")
    held_out = traced(two_version_bundle, tmp_path, "b", "b is another text, for comparing them")
    arguments = ["tune", str(two_version_bundle), "--trace", str(training), "--held-out", str(held_out)]

    done = call([*arguments, "--modes", "dynamic-precision 0.2,0.7", "--json"])
    assert done.exception is None
    told = json.loads(done.stdout)
    assert told["modes"] == "dynamic-precision 0.2,0.7" and not tuning_path(two_version_bundle).exists()
    policies = ["lrfu", "lru", "lfu", "edgemoe", "popularity", "hobbit", "hobbit, lhu 0"]
    assert [row["policy"] for row in told["rows"][:7]] == policies
    by_policy = {
        row["policy"]: row for row in told["rows"] if row["capacity_bytes"] == told["rows"][0]["capacity_bytes"]
    }
    assert all(row["decisions"]["low_share"] > 0 and row["gap_closed"] is None for row in by_policy.values())
    assert by_policy["hobbit, lhu 0"]["weights"].split(",")[2] == "0"
    table = call([*arguments, "--modes", "dynamic-precision 0.2,0.7"])
    assert "low" in table.stdout and "policy-weights" in table.stderr
    for modes, message in [
        ("big-little gamma=0.5", "does not depend on the cache"),
        ("sweep", "weights are fitted to one setting"),
        ("dynamic-precision 0,1; dynamic-precision 0,0.5", "weights are fitted to one setting"),
        ("dynamic-precision 0,1 + big-little gamma=0.5,k=3", "has not recorded: a little model of this size"),
    ]:
        refused = call([*arguments, "--modes", modes]).exception
        assert isinstance(refused, MoecError) and message in refused.message


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--modes", "dynamic-precision 0,1"], "`--modes` has no effect without traces"),
        (["--trace", "a"], "`--trace` and `--held-out` need each other"),
        (["--trace", "a", "--held-out", "b", "--tokens", "5"], "`--tokens` has no effect"),
        (["--trace", "a", "--held-out", "b"], "the trace `a` cannot be read"),
    ],
)
def test_a_fit_without_what_it_needs_is_refused(bundle: Path, more: list[str], message: str) -> None:
    done = call(["tune", str(bundle), *more])
    assert isinstance(done.exception, MoecError) and message in done.exception.message
    assert not tuning_path(bundle).exists()


def test_a_fitted_policy_is_used_unless_the_command_line_names_one(bundle: Path) -> None:
    options: dict[str, str | int] = {"policy": "hobbit", "policy_weights": "0.25,0.5,0,0.25"}
    write_tuning(bundle, tuning_of(bundle, options))
    assert "policy hobbit 0.25,0.5,0,0.25," in mode(bundle)
    assert "policy lru," in mode(bundle, "--set", "policy=lru"), "a policy and its weights are one choice"


RECENT = EvictionWeights(1, 0, 0, 0)


def text(seed: int, tokens: int, habit: int) -> RoutedText:
    """Return a text of three layers whose tokens choose two of eight experts.

    habit: number of experts from which consecutive tokens choose; they move on every few tokens.
    """
    draw = np.random.default_rng(seed)
    chosen = {
        layer: np.array([(draw.permutation(habit)[:2] + at // 6 * habit + layer) % 8 for at in range(tokens)], np.int32)
        for layer in range(3)
    }
    return RoutedText(4, chosen)


def test_a_prompt_requests_each_expert_once_and_tokens_their_own() -> None:
    chosen = {0: np.array([[1, 2], [2, 3], [0, 1], [3, 0]], np.int32), 2: np.array([[0, 1]] * 4, np.int32)}
    assert requests_of(RoutedText(2, chosen), [0, 8, 16, 24]) == [
        (0, (1, 2, 3)),
        (2, (16, 17)),
        (0, (0, 1)),
        (2, (16, 17)),
        (0, (3, 0)),
        (2, (16, 17)),
    ]


def test_penalties_are_relative_to_the_default_weights(mixed_bundle: Path) -> None:
    with open_bundle(mixed_bundle) as opened:
        replayed = replayed_bundle(opened)
    replays = EvictionReplays(replayed, [requests_of(text(seed, 60, 3), [0, 8, 16, 24]) for seed in range(4)])
    assert replays.capacities and replays.penalty(DEFAULT_WEIGHTS) == 1
    by_text = replays.by_text(RECENT)
    assert by_text.shape == (4,) and replays.penalty(RECENT) == pytest.approx(by_text.mean()) != 1


def test_weights_are_fitted_to_one_set_and_judged_on_another(mixed_bundle: Path) -> None:
    alike = [text(seed, 40, 3) for seed in range(8)]
    unlike = [text(100 + seed, 40, 8) for seed in range(8)]
    told: list[tuple[int, int]] = []
    found = fit_to_texts(mixed_bundle, alike, unlike, lambda done, every: told.append((done, every)))
    assert found is not None and told[-1] == (1, 1)
    record = found.record
    assert record["texts"] == record["held_out_texts"] == 8
    with open_bundle(mixed_bundle) as opened:
        replayed = replayed_bundle(opened)
    weights = EvictionWeights(**found.weights)
    for texts, ratio in ((alike, record["fitted_ratio"]), (unlike, record["held_out_ratio"])):
        replays = EvictionReplays(replayed, [requests_of(each, [0, 8, 16, 24]) for each in texts])
        assert replays.penalty(weights) == pytest.approx(ratio, abs=1e-6)
    assert record["fitted_ratio"] < 1, "these texts have habits that the default weights do not know"
    assert found.is_better == record["kept"] == (record["held_out_interval95"][1] < 1)
    again = fit_to_texts(mixed_bundle, alike, alike, lambda done, every: None)
    assert again is not None and again.record["held_out_ratio"] == record["fitted_ratio"]
