"""`moec tune`: what pays is kept, what does not is not, and a file for another machine or bundle is left aside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from moec.cli import tune
from moec.cli.main import cli
from moec.profiles.probe import machine_sha256
from moec.runtime.options import RuntimeOptions
from moec.runtime.tuning import Tuning, bundle_sha256, read_tuning, tuning_path, write_tuning


@pytest.fixture
def bundle(mixed_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mixed_bundle, tmp_path / "bundle"))


def slower(**slow: float) -> Callable[[RuntimeOptions], float]:
    """Seconds per token that depend on the options alone, by factors."""

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
    assert best == replace(options, prefetch_layers=3, prefetch_experts=4)
    assert [t["value"] for t in trials if t["option"] == "prefetch_experts"] == [2, 4, 8]
    assert [t["value"] for t in trials if t["option"] == "prefetch_layers"] == [1, 3]


def test_one_lucky_turn_is_not_enough() -> None:
    turns = iter(range(10_000))

    def seconds(options: RuntimeOptions) -> float:
        return 0.5 if options.readers == 4 and next(turns) == 0 else 1.0

    assert tune.search(RuntimeOptions(threads=1), 8, seconds)[0] == RuntimeOptions(threads=1)


def test_the_file_lies_beside_the_bundle_and_is_used(bundle: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in bundle.iterdir())
    done = CliRunner().invoke(
        cli, ["tune", str(bundle), "--expert-cache", "50%", "--tokens", "3", "--json"], standalone_mode=False
    )
    assert done.exception is None
    told = json.loads(done.stdout)
    assert Path(told["path"]) == tmp_path / "bundle.tune.json" == tuning_path(bundle)
    assert sorted(path.name for path in bundle.iterdir()) == before
    found = read_tuning(bundle)
    assert found is not None and found.trials == told["trials"] and len(found.trials) >= 4

    write_tuning(bundle, replace(found, options={"readers": 5, "prefetch": "path"}))
    assert "prefetch path" in mode(bundle) and "readers 5" in mode(bundle)
    assert "readers 1" in mode(bundle, "--readers", "1"), "the command line comes first"


def mode(bundle: Path, *more: str) -> str:
    arguments = ["run", str(bundle), "--prompt", "ab", "--max-new-tokens", "1", "--expert-cache", "50%", *more]
    done = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert done.exception is None
    return done.stderr


@pytest.mark.parametrize("field", ["machine", "bundle"])
def test_a_file_for_something_else_is_named_and_left_aside(bundle: Path, field: str) -> None:
    tuning = Tuning(machine_sha256(), bundle_sha256(bundle), {"readers": 5})
    write_tuning(bundle, replace(tuning, **{field: "0" * 64}))
    told = mode(bundle)
    assert "warning" in told and "bundle.tune.json" in told and "readers 2" in told


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format_version": 2}',
        '{"format_version": 1, "machine": "", "bundle": "", "options": {"io": "mmap"}, "trials": []}',
        '{"format_version": 1, "machine": "", "bundle": "", "options": {"readers": true}, "trials": []}',
        '{"format_version": 1, "machine": "", "bundle": "", "options": {"prefetch": "magic"}, "trials": []}',
        '{"format_version": 1, "machine": "", "bundle": "", "options": []}',
    ],
)
def test_a_damaged_file_is_left_aside(bundle: Path, text: str) -> None:
    tuning_path(bundle).write_text(text)
    with pytest.raises(ValueError):
        read_tuning(bundle)
    assert "warning" in mode(bundle)
