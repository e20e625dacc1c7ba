"""Lossy modes on the command line: sweeps, measured losses, chosen thresholds."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moec.cli.lossy_modes.mode_sweep import ModesMeasurement, allowed_settings, settings_of
from moec.cli.main import cli
from moec.compiler.request.ports import UnpublishedBundle
from moec.evaluation import run
from moec.evaluation.data import load_items
from moec.manifests.errors import OptionError
from moec.manifests.model import RouterSpec
from moec.runtime import kernels
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.options.runtime import RuntimeOptions
from moec.runtime.tuning import mode_records
from moec.runtime.tuning.mode_records import (
    calibrated_deciles,
    calibrated_lower_half,
    load_record,
    measured_rows,
    record_path,
    recorded_setting,
)
from tests.gates.bundles import emit_bundle
from tests.tiny_compile import little_memory, save_model, save_texts
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

from .conftest import Invoke


@pytest.fixture(scope="module")
def two_versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modes") / "model"
    save_tiny_mixtral(folder, TinyMixtral(layers=2, experts=8, top_k=4, seed=9))
    return emit_bundle(folder, folder.parent / "modes-moec", bitwidth=8, low="q2g32")


@pytest.fixture(scope="module")
def swept(two_versions: Path) -> dict[str, Any]:
    """Return the record of a sweep, which is also next to the bundle. Texts are short, so every token is a pass."""
    data = two_versions.with_name("short.jsonl")
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("A first text", "x", "Another, longer")))
    arguments = ["eval", str(two_versions), "--data", str(data), "--modes", "sweep", "--expert-cache", "50%", "--json"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def own(two_versions: Path, tmp_path: Path) -> Path:
    """A copy of the bundle without a record."""
    return Path(shutil.copytree(two_versions, tmp_path / "own-moec"))


@pytest.fixture
def recorded(own: Path, two_versions: Path, swept: dict[str, Any]) -> Path:
    """A copy of the bundle with its record next to it."""
    shutil.copy(record_path(two_versions), record_path(own))
    return own


def test_a_sweep_of_quality_is_kept_and_quoted(
    invoke: Invoke, recorded: Path, swept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, record = recorded, swept
    rows = {row["mode"]: row for row in record["rows"]}
    assert rows[""]["loss"]["loss"] == 0 and rows[""]["kl"]["mean"] == 0 and rows[""]["decisions"] is None
    low = rows["dynamic-precision 0,1"]
    assert low["decisions"]["low"] > 0 and low["kl"]["mean"] > 0 and low["loss"]["loss"] != 0
    assert rows["big-little gamma=0.9,k=K/2"]["decisions"]["fallback_share"] == 1  # random weights: no token is certain
    assert rows["big-little gamma=0.9,k=K/2"]["kl"]["mean"] < 1e-6
    # Every setting does the same work: answers are scored token by token, and there is no prompt.
    nothing = rows["dynamic-precision 0.95,0.95"]
    assert nothing["bytes_read_per_token"] == pytest.approx(rows[""]["bytes_read_per_token"], rel=0.2)
    assert all(row["ttft_ns"] is None for row in rows.values())
    assert record["task"] == "perplexity" and record["n"] == 3 and record["cache_state"] == "warm"
    assert [row["mode"] for row in measured_rows(own)] == [mode for mode in rows if mode]
    told = invoke("run", own, "--prompt", "a", "--max-new-tokens", 2, "--lossy", "dynamic-precision 0,1")
    assert f"measured to cost {low['loss']['loss']:.2%}" in told.stderr and "decisions" in told.stderr
    assert "router is flat" not in told.stderr
    monkeypatch.setattr("moec.runtime.modes.mode_counts.FLAT_SHARE", 0.01)
    told = invoke("run", own, "--prompt", "a", "--max-new-tokens", 2, "--lossy", "dynamic-precision 0,1")
    assert "the router is flat: the lower half of its choice has" in told.stderr
    told = invoke("run", own, "--prompt", "a", "--max-new-tokens", 2, "--lossy", "dynamic-precision 0,0.3")
    assert "its cost was not measured" in told.stderr
    assert "measured" not in invoke("run", own, "--prompt", "a", "--max-new-tokens", 2).stderr


@pytest.mark.parametrize(
    ("statistics", "expected"),
    [
        ({"lower_half_share": [0.0, 0.45, 0.41]}, 0.43),  # the first layer has no router
        ({"lower_half_share": [0.0, 0.0]}, None),
        ({"lower_half_share": ["much"]}, None),
        ({}, None),
        (None, None),
    ],
)
def test_flatness_in_calibration_is_the_mean_of_layers_that_route(
    tmp_path: Path, statistics: object, expected: float | None
) -> None:
    (tmp_path / "quality.json").write_text(json.dumps({"statistics": statistics}))
    assert calibrated_lower_half(tmp_path) == (None if expected is None else pytest.approx(expected))


def test_modes_that_nobody_measured_are_checked_against_calibration(
    invoke: Invoke, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("run", own, "--prompt", "a", "--max-new-tokens", 2, "--lossy", "cache-routing margin=0.1")
    told = invoke(*asked)
    assert "its cost was not measured" in told.stderr and "is flat" not in told.stderr
    for share, is_flat in ((0.43, True), (0.3, False)):
        monkeypatch.setattr("moec.runtime.tuning.mode_records.calibrated_lower_half", lambda bundle, found=share: found)
        told = invoke(*asked)
        warning = "the router is flat on calibration data: the lower half of its choice has 43% of the weight"
        assert told.exit_code == 0 and (warning in told.stderr) == is_flat


def test_thresholds_are_chosen_from_what_was_measured(
    invoke: Invoke, own: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = ("run", own, "--prompt", "a", "--max-new-tokens", 2, "--lossy")
    refused = invoke(*auto, "auto 5%")
    assert refused.exit_code != 0 and "--modes sweep" in refused.stderr
    request.getfixturevalue("recorded")
    path = record_path(own)
    record = json.loads(path.read_text())
    costs = {"0.9,1": 0.001, "0.75,1": 0.004, "0,1": 0.02}
    for row in record["rows"]:
        thresholds = row["options"].get("dynamic_precision")
        if set(row["options"]) == {"dynamic_precision"}:
            row["loss"]["upper95"] = costs.get(thresholds, 1.0)
            row["decisions"] |= {"skipped_share": 0.0, "low_share": 10 * costs.get(thresholds, 0)}
    path.write_text(json.dumps(record))
    assert "dynamic-precision 0.75,1)" in invoke(*auto, "auto 1%").stderr
    assert "dynamic-precision 0,1)" in invoke(*auto, "auto 2%").stderr
    told = invoke(*auto, "auto 0.05%").stderr
    assert (
        "no thresholds were measured to cost at most 0.05%" in told and "the least 95 % bound of them is 0.10%" in told
    )
    assert "allow more: --lossy 'auto 0.1%'" in told
    assert "is not a share" in invoke(*auto, "auto much").stderr
    assert "has no loss target" in invoke(*auto, "auto").stderr
    told = load_record(own / "quality.json") | {"target": {"kind": "loss", "value": 0.005}}
    monkeypatch.setattr(mode_records, "load_record", lambda path: told if path.name == "quality.json" else record)
    assert "dynamic-precision 0.75,1)" in invoke(*auto, "auto").stderr, "the share that the compile was asked for"


def test_auto_says_the_smallest_bound_that_its_items_can_show(recorded: Path) -> None:
    """With one further item that loses everything, drawn at most three times in 95 % of the samples."""
    path = record_path(recorded)
    record = json.loads(path.read_text())
    for row in record["rows"]:
        row["loss"] |= {"upper95": 0.0121, "n": 500, "largest_item_loss": 2.0}
    path.write_text(json.dumps(record))
    with pytest.raises(OptionError, match=r"their items can show no bound below 1\.20%") as caught:
        recorded_setting(recorded, "auto 1%")
    assert "measure on more items" in str(caught.value.hint)
    assert recorded_setting(recorded, "auto 1.3%").startswith("dynamic-precision ")


def test_what_was_measured_before_stays(invoke: Invoke, recorded: Path, texts: Path) -> None:
    before = {row["mode"]: row for row in measured_rows(recorded)}
    modes = "big-little gamma=0.9; dynamic-precision 0,0.5"
    arguments = ("eval", recorded, "--data", texts, "--modes", modes, "--expert-cache", "60%")
    assert invoke(*arguments).exit_code == 0
    after = {row["mode"]: row for row in measured_rows(recorded)}
    assert set(after) == {*before, "dynamic-precision 0,0.5"}
    assert after["big-little gamma=0.9,k=K/2"]["expert_cache"] == "60%"
    kept = after["dynamic-precision 0,1"]
    assert kept == before["dynamic-precision 0,1"] and kept["expert_cache"] == "50%", "with its own conditions"


def test_an_interrupted_sweep_keeps_what_it_measured(
    invoke: Invoke, own: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, count = run.evaluate, 0

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return evaluate(*arguments, **named)

    monkeypatch.setattr(run, "evaluate", interrupted)
    modes = "big-little gamma=0.9; big-little gamma=0.8"
    assert invoke("eval", own, "--data", texts, "--modes", modes).exit_code != 0
    assert [row["mode"] for row in measured_rows(own)] == ["big-little gamma=0.9,k=K/2"]


def test_a_sweep_takes_its_thresholds_from_calibration(two_versions: Path, tmp_path: Path) -> None:
    manifest = open_bundle(two_versions).manifest
    deciles = [0.31, 0.4, 0.45, 0.5, 0.5521, 0.6, 0.65, 0.7, 0.8]
    quality = {"statistics": {"unimportance_deciles": deciles}}
    (tmp_path / "quality.json").write_text(json.dumps(quality))
    assert calibrated_deciles(tmp_path) == deciles
    found = [each.get("dynamic_precision") for each in settings_of("sweep", manifest, deciles)]
    alone = ["0,1", "0.4,1", "0.552,1", "0.7,1", "0.552,0.7", "0.7,0.7", "0.8,0.8"]
    assert [each for each in dict.fromkeys(found) if each is not None] == alone
    for wrong in (deciles[:8], deciles[::-1], ["a"] * 9, None):
        (tmp_path / "quality.json").write_text(json.dumps({"statistics": {"unimportance_deciles": wrong}}))
        assert calibrated_deciles(tmp_path) == []


def test_a_sweep_leaves_out_what_is_refused(two_versions: Path) -> None:
    """Sparsemixer always weighs two experts. The experts on a device of unknown size are unknown."""
    manifest = open_bundle(two_versions).manifest
    router = RouterSpec("sparsemixer", False, margin=0.02)
    layers = tuple(
        replace(each, experts=replace(each.experts, top_k=2, router=router)) for each in manifest.model.layers
    )
    sparse = replace(manifest.model, layers=layers)
    found = allowed_settings("sweep", sparse, True, (), None)
    assert len(found) > 5 and not any("cache_routing" in each for each in found)
    device = RuntimeOptions(accelerator="cuda")
    found = settings_of("sweep", manifest, (), device)
    assert [set(each) for each in found] == [set(), {"big_little"}, {"big_little"}, {"big_little"}]
    with pytest.raises(OptionError, match="How many an accelerator holds would depend on its free memory"):
        settings_of("dynamic-precision 0,1", manifest, (), device)
    sized = RuntimeOptions(accelerator="cuda", accelerator_memory="1GiB")
    assert len(settings_of("sweep", manifest, (), sized)) == len(settings_of("sweep", manifest, ()))


def test_modes_that_a_compile_cannot_measure_are_refused_before_it_begins(invoke: Invoke, tmp_path: Path) -> None:
    model, data = save_model(tmp_path / "model", layers=1, experts=4), save_texts(tmp_path / "texts")
    common = ("compile", model, "--bits-per-weight", 9, "--bits", 8, "--group-size", 32, "-o", tmp_path / "out")
    wrong = (("big-litle gamma=0.5", "is not a mode"), ("dynamic-precision 0,1", "asks for low versions"))
    for modes, message in wrong:
        refused = invoke(*common, "--data", data, "--modes", modes)
        assert refused.exit_code == 1 and message in refused.stderr and "calibrating" not in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "texts"]


def test_dynamic_precision_alone_is_a_value_of_modes(two_versions: Path, tmp_path: Path) -> None:
    """A compile with low versions measures these settings on its own, where the model has some."""
    manifest = open_bundle(two_versions).manifest
    alone = [each for each in settings_of("sweep", manifest, ()) if set(each) <= {"dynamic_precision"}]
    assert settings_of("dynamic-precision", manifest, ()) == alone and len(alone) > 3
    model = open_bundle(emit_bundle(save_model(tmp_path / "m", experts=2, top_k=1), tmp_path / "out")).manifest.model
    ModesMeasurement("dynamic-precision", is_asked=False).check(model, False)
    with pytest.raises(OptionError, match="this model has no other"):
        ModesMeasurement("dynamic-precision").check(model, False)


def test_records_of_other_bundles_and_broken_ones_count_for_nothing(recorded: Path) -> None:
    own, path = recorded, record_path(recorded)
    record = json.loads(path.read_text())
    assert measured_rows(own) != []
    for wrong in (
        {**record, "bundle": "0" * 64},
        {**record, "format_version": 2},
        {**record, "rows": [{**record["rows"][1], "options": {"threads": 1}}]},
        {**record, "rows": [{**record["rows"][1], "mode": "big-little gamma=1,k=K/2"}]},
        {**record, "rows": [{**record["rows"][1], "loss": None}]},
        [],
    ):
        path.write_text(json.dumps(wrong))
        assert measured_rows(own) == []
    path.write_text("{")
    assert measured_rows(own) == []


def test_a_sweep_of_speed(invoke: Invoke, two_versions: Path) -> None:
    arguments = ("bench", two_versions, "--modes", "sweep", "--tokens", 6, "--prompt", "abc", "--expert-cache", "50%")
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    rows = {row["mode"]: row for row in json.loads(result.stdout)["rows"]}
    assert all(row["tokens_per_s"] > 0 and row["ttft_ns"] > 0 for row in rows.values())
    assert rows[""]["kl"]["mean"] == 0 and rows["dynamic-precision 0,1"]["kl"]["mean"] > 0
    quoted = {row["mode"]: row["loss"] for row in measured_rows(two_versions)}
    assert all((row["quality"] or {}).get("loss") == quoted.get(mode) for mode, row in rows.items())
    told = invoke(*arguments)
    assert "LOSSY (dynamic-precision 0,1), deciding by a cache of " in told.stderr
    page = told.stdout
    assert "x exact" in page and "big-little gamma=0.5,k=K/2" in page and "fallback 100" in page


def test_a_sweep_of_chosen_settings(invoke: Invoke, two_versions: Path) -> None:
    modes = "big-little gamma=0.5; dynamic-precision 0,1 + cache-routing margin=0.2"
    result = invoke("bench", two_versions, "--modes", modes, "--tokens", 4, "--prompt", "abc", "--json")
    assert result.exit_code == 0, result.stderr
    wanted = ["", "big-little gamma=0.5,k=K/2", "cache-routing margin=0.2,drop=0 + dynamic-precision 0,1"]
    assert [row["mode"] for row in json.loads(result.stdout)["rows"]] == wanted


def test_decisions_are_told(invoke: Invoke, two_versions: Path, texts: Path) -> None:
    modes = ("--lossy", "big-little gamma=0.5 + cache-routing margin=0.5", "--expert-cache", "50%")
    told = json.loads(invoke("eval", two_versions, "--data", texts, *modes, "--json").stdout)
    assert told["decisions"]["fallback_share"] == 1 and "LOSSY" in told["mode"]
    bench = json.loads(invoke("bench", two_versions, "--tokens", 4, "--prompt", "abc", *modes, "--json").stdout)
    assert bench["decisions"]["tokens"] == 3
    prompts = texts.with_name("prompts.jsonl")
    prompts.write_text('{"prompt": "abc"}\n')
    beams = ("run", two_versions, "--prompt", "abc", "--max-new-tokens", 3, "--beams", 2, *modes)
    assert json.loads(invoke(*beams, "--json").stdout)["decisions"]["fallback_share"] == 1
    for command in (
        beams,
        ("eval", two_versions, "--data", texts, *modes),
        ("bench", two_versions, "--tokens", 4, "--prompt", "abc", *modes),
        (
            "generate",
            two_versions,
            "--prompts",
            prompts,
            "-o",
            texts.with_name("out.jsonl"),
            "--max-new-tokens",
            3,
            *modes,
        ),
    ):
        assert "decisions: " in (told := invoke(*command).stderr) and "fallback 100" in told, command[0]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("eval", "--modes", "sweep", "--slots", 2), "`--slots` has no effect"),
        (("eval", "--modes", "sweep", "--lossy", "big-little gamma=0.5"), "sets the modes itself"),
        (("bench", "--modes", "sweep", "--lossy", "big-little gamma=0.5"), "sets the modes itself"),
        (("eval", "--modes", "big-little gamma=0.5; more"), "`more` is not a mode"),
        (("eval", "--modes", "big-little gamma=0.5 + big-little gamma=0.6"), "is not a mode"),
        (("bench", "--lossy", "big-little gamma=0.5", "--trace-out", "x.trace"), "is of an exact run"),
        (("bench", "--modes", "sweep", "--trace-out", "x.trace"), "is of one run, not of a sweep of modes"),
        (("bench", "--modes", "sweep", "--policies", "all"), "is of one run, not of a sweep of modes"),
    ],
)
def test_what_does_not_go_together(
    invoke: Invoke, two_versions: Path, texts: Path, arguments: tuple[Any, ...], told: str
) -> None:
    command, *rest = arguments
    data = ("--data", texts) if command == "eval" else ()
    result = invoke(command, two_versions, *data, *rest)
    assert result.exit_code != 0 and told in result.stderr


def test_a_checkpoint_takes_modes(invoke: Invoke, checkpoint: Path, texts: Path) -> None:
    result = invoke("eval", checkpoint, "--data", texts, "--lossy", "cache-routing margin=0.5", "--json")
    assert result.exit_code == 0 and "LOSSY" in result.stderr and json.loads(result.stdout)["decisions"]


@pytest.mark.parametrize("holds_model", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_compile_puts_what_modes_cost_into_the_bundle(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds_model: bool
) -> None:
    if not holds_model:
        little_memory(monkeypatch.setattr)
    target, data = tmp_path / "out", tmp_path / "texts"
    model = save_model(tmp_path / "model", layers=1, experts=8)
    save_texts(data, train=4, validation=4, test=3)
    common = ("compile", model, "--bits-per-weight", 9, "--bits", 8, "--sensitivity", "proxy", "-o", target)
    assert "`--modes` is measured on" in invoke("compile", model, "--uniform", 8, "--modes", "sweep").stderr
    result = invoke(
        *common, "--data", data, "--fallback-bits", 2, "--group-size", 32, "--no-comparisons", "--modes", "sweep"
    )
    assert result.exit_code == 0, result.stderr
    quality = json.loads((target / "quality.json").read_text())
    assert quality["modes"]["expert_cache"] == "25%"
    assert "tokens_per_s" not in json.dumps(quality["modes"])
    assert "dynamic-precision 0,1" in {row["mode"] for row in measured_rows(target)}
    shown = invoke("inspect", target).stdout
    assert "low versions" in shown


def test_a_compile_with_low_versions_fits_thresholds(invoke: Invoke, tmp_path: Path, two_versions: Path) -> None:
    """`auto` and `published` work on a fresh bundle, without a sweep of its owner."""
    target, data = tmp_path / "out", tmp_path / "texts"
    model = save_model(tmp_path / "model", layers=1, experts=8)
    save_texts(data, train=4, validation=4, test=3)
    result = invoke(
        "compile", model, "--uniform", 8, "--group-size", 32, "--data", data, "--fallback-bits", 2, "-o", target
    )
    assert result.exit_code == 0, result.stderr
    modes = json.loads((target / "quality.json").read_text())["modes"]
    first, second = (float(part) for part in modes["published"].split(","))
    assert 0 < first <= second < 1
    settings = [row["options"] for row in modes["rows"]]
    assert settings[0] == {} and {"dynamic_precision": modes["published"]} in settings
    assert all(set(each) <= {"dynamic_precision"} for each in settings)
    run = ("run", target, "--prompt", "a", "--max-new-tokens", 2, "--lossy")
    assert f"LOSSY (dynamic-precision {first:g},{second:g})" in invoke(*run, "published").stderr
    assert "LOSSY (dynamic-precision" in invoke(*run, "auto 99%").stderr
    refused = invoke("run", two_versions, "--prompt", "a", "--lossy", "published")
    assert refused.exit_code == 1 and "HOBBIT's shares" in refused.stderr


def test_modes_are_measured_in_what_memory_a_compile_leaves(
    two_versions: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items, _ = load_items(texts, "perplexity")
    asked = UnpublishedBundle(two_versions, items.task, items.items[:2], (), [], memory_bytes=2 << 30)
    measurement = ModesMeasurement("dynamic-precision 0,1")
    assert measurement(asked)["expert_cache"] == "25%", "there is room for that"
    monkeypatch.setattr("moec.compiler.walker.memory.COMPILE_PROCESS_BYTES", 3 << 30)
    assert measurement(asked)["expert_cache"] == f"--memory {2 << 30}"


def test_so_many_tokens_of_an_answer_are_held(two_versions: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.cli.lossy_modes.mode_sweep.KL_TOKENS", 5)
    items, _ = load_items(texts, "perplexity")
    record = ModesMeasurement("big-little gamma=0.5")(UnpublishedBundle(two_versions, items.task, items.items, (), []))
    # The texts have five tokens, one, and five, and an end token each. The first token of a text has no score.
    assert all(row["kl"]["n"] == 5 + 1 + 5 for row in record["rows"])


SETTING = "expert-activations bfloat16"
RUN = ("--prompt", "a", "--max-new-tokens", 2, "--lossy", SETTING)


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A bundle with 16-bit experts."""
    folder = save_tiny_mixtral(tmp_path / "model", TinyMixtral(layers=2, experts=4, top_k=2, seed=9))
    return emit_bundle(folder, tmp_path / "wide-moec")


def test_the_price_of_expert_activations_is_measured_and_quoted(invoke: Invoke, wide: Path) -> None:
    if not kernels.bfloat_kernels():
        pytest.skip(f"the kernels {kernels.active()} have no products of bfloat16")
    before = invoke("run", wide, *RUN)
    assert "LOSSY (expert-activations bfloat16)" in before.stderr
    assert f'its cost was not measured: moec eval BUNDLE --data DATA --modes "{SETTING}"' in before.stderr
    data = wide.with_name("short.jsonl")
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("A first text", "Another, longer")))
    record = json.loads(
        invoke("eval", wide, "--data", data, "--modes", SETTING, "--expert-cache", "100%", "--json").stdout
    )
    plain, row = record["rows"]
    assert (plain["mode"], row["mode"], row["decisions"]) == ("", SETTING, None) and row["kl"]["mean"] > 0
    assert [each["mode"] for each in measured_rows(wide)] == [SETTING]
    after = invoke("run", wide, *RUN)
    assert "measured to cost" in after.stderr and "of perplexity on 2 items" in after.stderr
    assert "LOSSY" not in invoke("run", wide, "--prompt", "a", "--max-new-tokens", 2).stderr
    timed = invoke("bench", wide, "--modes", SETTING, "--tokens", 2, "--json")
    assert [each["mode"] for each in json.loads(timed.stdout)["rows"]] == ["", SETTING]


def test_a_compile_does_not_measure_expert_activations(wide: Path) -> None:
    with pytest.raises(OptionError, match="few processors"):
        ModesMeasurement(SETTING).check(open_bundle(wide).manifest.model, False)
