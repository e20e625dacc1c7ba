"""A bundle for a named device: which options its profile decides, and what is said. The order of the four levels."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from moec.cli.commands.measuring.tune import changed
from moec.cli.main import cli
from moec.cli.options.set_option import RUN_SETTINGS
from moec.cli.options.tuned_options import planned_cache_bytes
from moec.manifests.bundle import DEVICE_NAME
from moec.manifests.errors import ChecksumMismatch, MemoryBudgetExceeded
from moec.profiles.device import DeviceProfile
from moec.profiles.device_parts import Cores, Run
from moec.profiles.loading import load_profile
from moec.profiles.probe import allowed_processors, machine_sha256, memory_limit_bytes, storage_sha256
from moec.profiles.processor import instruction_sets, little_processors
from moec.runtime.options.runtime import RuntimeOptions
from moec.runtime.tuning.mode_records import write_record
from moec.runtime.tuning.tune_file import Tuning, bundle_sha256, write_tuning
from tests.gates.bundles import emit_bundle

RUN = ("run", "--prompt", "ab", "--max-new-tokens", "1")
BUDGET = 100 << 20
PROCESSORS = len(allowed_processors())
ENGINE = "moec.runtime.engine.engine.Engine.__init__"


def board(**changes: Any) -> DeviceProfile:
    """A device like this machine, with settings that differ from the built-in ones."""
    laptop = load_profile("laptop")
    run = changes.pop("run", Run("buffered", 3))
    keys = [*changes.pop("extra", ()), *(() if run is None else (f"run.{key}" for key in run.stated()))]
    facts = {"threads": PROCESSORS, "instruction_sets": instruction_sets(), "memory_budget_bytes": BUDGET}
    sources = laptop.provenance | dict.fromkeys(keys, "estimate")
    return replace(laptop, name="board", run=run, provenance=sources, **{**facts, **changes})


@pytest.fixture
def make(checkpoint: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that compiles the tiny model for a device."""

    def compiled(profile: DeviceProfile | None = None, **more: Any) -> Path:
        return emit_bundle(checkpoint, tmp_path / "board-moec", profile=profile or board(), **more)

    return compiled


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[RuntimeOptions]:
    """The options of every engine that a command opens. None is opened."""
    found = list[RuntimeOptions]()

    def refuse(engine: object, bundle: object, options: RuntimeOptions, **more: object) -> None:
        found.append(options)
        raise InterruptedError("enough")

    monkeypatch.setattr(ENGINE, refuse)
    return found


@pytest.fixture(autouse=True)
def small_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of memory counts the process of a test as that of a run, not with torch."""
    monkeypatch.setattr("moec.runtime.memory.budget.resident_set_bytes", lambda: 48 << 20)


@pytest.fixture(autouse=True)
def no_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile states processors. A quota of the machine that runs the tests would replace them."""
    monkeypatch.setattr("moec.profiles.probe.processor_quota", lambda system=None: math.inf)


def call(bundle: Path, *more: str, command: tuple[str, ...] = RUN) -> Result:
    return CliRunner().invoke(cli, [command[0], str(bundle), *command[1:], *more], standalone_mode=False)


def tune(bundle: Path, **options: str | int) -> None:
    """Write a tuning that is valid for a run with the memory of the profile."""
    cache_bytes = planned_cache_bytes(bundle, RuntimeOptions(memory=str(BUDGET)))
    write_tuning(bundle, Tuning(machine_sha256(), storage_sha256(bundle), bundle_sha256(bundle), cache_bytes, options))


@pytest.mark.parametrize(
    ("name", "built_in", "of_profile", "tuned", "given"),
    [
        ("threads", 0, PROCESSORS, 5, 7),
        ("readers", 2, 3, 5, 7),
        ("io", "auto", "buffered", None, "mmap"),
        ("memory", None, "100MiB", None, "200MiB"),
    ],
)
def test_the_order_of_the_levels(
    make: Callable[..., Path],
    chosen: list[RuntimeOptions],
    name: str,
    built_in: object,
    of_profile: object,
    tuned: int | None,
    given: object,
) -> None:
    bundle = make()
    call(bundle)
    if tuned is not None:
        tune(bundle, **{name: tuned})
        assert "warning" not in call(bundle).stderr
        assert getattr(chosen.pop(), name) == tuned
    told = call(bundle, *(("--set", f"{name}={given}") if name in RUN_SETTINGS else (f"--{name}", str(given))))
    assert [getattr(options, name) for options in chosen] == [of_profile, given]
    assert f"--{name}" not in told.stderr and f"{name}=" not in told.stderr
    for path in (bundle, bundle.with_name("board-moec.tune.json")):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    call(make(board(threads=PROCESSORS + 1)))
    assert getattr(chosen[-1], name) == built_in


def test_the_line_and_the_entry_of_json(make: Callable[..., Path]) -> None:
    bundle, threads = make(), PROCESSORS
    result = call(bundle, "--json")
    told = json.loads(result.stdout)
    settings = {"memory": "100MiB", "threads": threads, "io": "buffered", "readers": 3}
    assert told["device"] == {
        "profile": "board",
        "difference": None,
        "slower": None,
        "options": settings,
        "free_budget_bytes": None,
        "lacks_little_cores": False,
        "suggestion": None,
    }
    assert told["memory"]["budget_bytes"] == BUDGET
    assert "io buffered, readers 3, " in told["mode"] and f", threads {threads}, " in told["mode"]
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("device: ")]
    start = "device: board, for which the bundle was compiled: "
    assert line.startswith(f"{start}--memory 100MiB --threads {threads} --io buffered --set readers=3 (expert cache ")
    given = ("--memory", "200MiB", "--threads", "1", "--io", "auto", "--set", "readers=2")
    assert f"{start}other options replace its settings\n" in call(bundle, *given).stderr
    line = call(bundle, "--expert-cache", "50%").stderr
    assert f"{start}--threads {threads} --io buffered --set readers=3\n" in line


def test_a_profile_without_settings_of_a_run(make: Callable[..., Path], chosen: list[RuntimeOptions]) -> None:
    assert f"--memory 100MiB --threads {PROCESSORS} (expert cache" in call(make(board(run=None))).stderr
    assert (chosen[0].io, chosen[0].readers) == ("auto", 2)


def with_capacities(folder: Path, *capacities: int) -> Callable[..., tuple[int, ...]]:
    """The function that finds little cores, on a system whose processors have such capacities."""
    for number, capacity in zip(sorted(allowed_processors()), capacities, strict=False):
        place = folder / f"sys/devices/system/cpu/cpu{number}"
        place.mkdir(parents=True)
        (place / "cpu_capacity").write_text(f"{capacity}\n")
    return partial(little_processors, system=folder)


LITTLE = "moec.profiles.processor.little_processors"
UNTIL_ROUTED = ("--set", "prefetch-rule=until-routed")
needs_two_processors = pytest.mark.skipif(PROCESSORS < 2, reason="NOT RUN: one processor is of one kind")


def little_board() -> DeviceProfile:
    """A device like this machine, with one little core. The profile counts it and states no number."""
    return board(cores=Cores(max(1, PROCESSORS - 1), 1), extra=("cores.big", "cores.little"))


@needs_two_processors
def test_a_reader_of_its_own_runs_on_the_little_cores(
    make: Callable[..., Path], chosen: list[RuntimeOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = sorted(allowed_processors())
    monkeypatch.setattr(LITTLE, with_capacities(tmp_path, 446, *[1024] * (PROCESSORS - 1)))
    bundle = make(little_board())
    assert (
        "--reader-cpus" not in call(bundle).stderr
        and "--reader-cpus" not in call(bundle, "--set", "prefetch=off").stderr
    )
    told = call(bundle, *UNTIL_ROUTED).stderr
    assert f" --set readers=3 --set reader-cpus={first} (expert cache " in told
    told = call(bundle, *UNTIL_ROUTED, "--set", f"reader-cpus={second}").stderr
    assert "reader-cpus" not in told
    assert "reader-cpus" not in call(bundle, *UNTIL_ROUTED, "--set", "prefetch=off").stderr
    tune(bundle, prefetch_rule="until-routed")
    assert f"--set reader-cpus={first}" in call(bundle).stderr, "the rule of the tuning"
    assert [options.reader_cpus for options in chosen] == [None, None, str(first), str(second), None, str(first)]


@needs_two_processors
def test_little_cores_that_the_machine_does_not_tell_are_left_out(
    make: Callable[..., Path], chosen: list[RuntimeOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LITTLE, with_capacities(tmp_path, *[1024] * PROCESSORS))
    bundle = make(little_board())
    told = call(bundle, *UNTIL_ROUTED).stderr
    assert "; this machine does not tell which of its processors are little, so its own reader runs on any\n" in told
    assert "little" not in call(bundle).stderr
    assert [options.reader_cpus for options in chosen] == [None, None]


@needs_two_processors
def test_trials_of_a_tuning_run_as_the_run_does(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LITTLE, with_capacities(tmp_path, 446, *[1024] * (PROCESSORS - 1)))
    seen = list[RuntimeOptions]()

    def searched(options: RuntimeOptions, *_: object) -> tuple[RuntimeOptions, list[dict[str, Any]]]:
        seen.extend((options, changed(options, "prefetch_rule", "until-routed")))
        return options, []

    monkeypatch.setattr("moec.cli.commands.measuring.tune.search", searched)
    told = json.loads(call(make(little_board()), "--json", command=("tune", "--tokens", "2")).stdout)
    assert [options.reader_cpus for options in seen] == [None, str(min(allowed_processors()))]
    assert "reader_cpus" not in told["device"]["options"]


def test_another_machine(make: Callable[..., Path], chosen: list[RuntimeOptions]) -> None:
    line = call(make(board(threads=PROCESSORS + 1))).stderr
    assert line.startswith("device: compiled for board; this machine differs (it has ")
    assert "threads, the profile" in line and line.endswith("), so its own memory, threads and I/O apply\n")
    assert chosen == [RuntimeOptions()]


@pytest.mark.parametrize("command", [("run", "--prompt", "x"), ("bench", "--tokens", "3"), ("inspect",)])
def test_a_processor_without_the_assumed_set(
    make: Callable[..., Path], chosen: list[RuntimeOptions], command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moec.profiles.probe.instruction_sets", lambda _: ("avx2", "scalar"))
    told = call(make(board(instruction_sets=("avx512vnni", "avx2"))), command=command)
    said = told.stdout if command == ("inspect",) else told.stderr
    assert "its predicted speed assumes avx512vnni, which this processor lacks, so a run is slower" in said


def test_less_free_memory_than_the_budget(
    make: Callable[..., Path], chosen: list[RuntimeOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = make()
    monkeypatch.setattr("moec.runtime.memory.budget.available_memory_bytes", lambda: 40 << 20)
    assert "; its budget of 100.0 MiB exceeds 7/8 of the free memory, so 83.0 MiB apply" in call(bundle).stderr
    assert chosen[0].memory is None and chosen[0].readers == 3


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--prompts", "texts.jsonl", "--field", "text", "-o", "out.jsonl"),
        ("eval", "--data", "texts.jsonl"),
        ("bench", "--tokens", "3"),
        ("tune", "--tokens", "3"),
    ],
)
def test_every_command_that_decodes(
    make: Callable[..., Path],
    chosen: list[RuntimeOptions],
    command: tuple[str, ...],
    texts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(texts.parent)
    told = call(make(), command=command)
    assert isinstance(told.exception, InterruptedError), told.exception
    assert {(each.memory, each.io, each.readers) for each in chosen} == {("100MiB", "buffered", 3)}
    assert told.stderr.count("device: board, for which the bundle was compiled: --memory 100MiB") == 1


def test_a_sweep_of_modes_keeps_its_small_cache(make: Callable[..., Path], chosen: list[RuntimeOptions]) -> None:
    told = call(make(), command=("bench", "--tokens", "3", "--modes", "sweep"))
    assert (chosen[0].memory, chosen[0].expert_cache, chosen[0].readers) == (None, "25%", 3)
    assert "--memory" not in told.stderr


def test_a_tuning_is_measured_with_the_profile_and_fits_the_run(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget leaves a part of the experts, so a tuning for all of them would be ignored."""
    bundle = make()
    needed = int(json.loads(call(bundle, "--json").stdout)["memory"]["floor_bytes"])
    shutil.rmtree(bundle)
    bundle = make(board(memory_budget_bytes=needed + (40 << 10)))
    monkeypatch.setattr("moec.cli.commands.measuring.tune.alternatives", lambda options, top_k: iter([("readers", 5)]))
    monkeypatch.setattr("moec.cli.commands.measuring.tune.LEAST_GAIN", -1.0)
    monkeypatch.setattr("moec.cli.commands.measuring.tune.ROUNDS", 1)
    told = json.loads(call(bundle, "--json", command=("tune", "--tokens", "2")).stdout)
    assert told["options"] == {"readers": 5} and told["device"]["options"]["readers"] == 3
    result = call(bundle, "--json")
    assert "warning" not in result.stderr and "readers 5" in json.loads(result.stdout)["mode"]
    assert json.loads(result.stdout)["memory"]["cache_bytes"] < 2 * told["expert_cache_bytes"]


def test_a_bundle_for_the_host_says_nothing(bundle: Path) -> None:
    assert not (bundle / DEVICE_NAME).exists()
    result = call(bundle, "--json")
    assert "device" not in json.loads(result.stdout) and "device" not in result.stderr


def test_a_profile_that_was_changed_is_refused(make: Callable[..., Path]) -> None:
    bundle = make()
    path = bundle / DEVICE_NAME
    path.write_bytes(path.read_bytes().replace(b'"estimate"', b'"measured"'))
    assert isinstance(call(bundle).exception, ChecksumMismatch)


def test_inspect_shows_the_settings(make: Callable[..., Path]) -> None:
    bundle = make()
    run = json.loads(call(bundle, "--json", command=("inspect",)).stdout)["run"]
    assert run["options"] == {"memory": "100MiB", "threads": PROCESSORS, "io": "buffered", "readers": 3}
    assert run["difference"] is None and run["expert_cache_bytes"] > 0
    page = call(bundle, command=("inspect",)).stdout
    assert "--io buffered --set readers=3 (expert cache " in page and "this machine is one" in page


def test_a_floor_above_all_memory_is_refused(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  51200 kB\n")
    monkeypatch.setattr("moec.runtime.memory.budget.memory_limit_bytes", lambda: memory_limit_bytes(tmp_path))
    for more in ((), ("--memory", "1GiB"), ("--expert-cache", "50%")):
        error = call(bundle, *more).exception
        assert isinstance(error, MemoryBudgetExceeded)
        assert error.message.startswith(f"`{bundle}` needs at least ") and "this machine has 50MiB" in error.message
        assert error.hint == "compile for this machine with `--device host`, or shorten `--context`"
    error = call(bundle, "--beams", "2").exception
    assert isinstance(error, MemoryBudgetExceeded)
    assert error.hint == "decode fewer sequences at once, or shorten `--context`"
    (tmp_path / "proc/meminfo").unlink()
    assert call(bundle, "--memory", "1GiB").exception is None, "a system that does not tell its memory is not refused"


def record(bundle: Path, loss: float, skipped: float = 0.2) -> None:
    """Write a measured row of dynamic precision. 30 % of the experts are missed, and most of them are skipped."""
    row = {
        "mode": "dynamic-precision 0.6,1",
        "options": {"dynamic_precision": "0.6,1"},
        "loss": {"loss": loss, "upper95": loss, "interval95": [0.0, loss]},
        "decisions": {"skipped_share": skipped, "low_share": 0.0, "missed_share": 0.3},
    }
    write_record(bundle, {"task": "gsm8k", "n": 9, "expert_cache": "25%", "cache_state": "warm", "rows": [row]})


@pytest.mark.parametrize(
    ("loss", "skipped", "storage_bytes_per_s", "more", "is_suggested"),
    [
        (0.004, 0.2, 1000, (), True),
        (0.02, 0.2, 1000, (), False),
        (0.004, 0.0029, 1000, (), False),  # not even 1 % less
        (0.004, 0.2, 40_000_000_000, (), False),
        (0.004, 0.2, 1000, ("--lossy", "big-little gamma=0.5"), False),
        (None, 0.2, 1000, (), False),
    ],
)
def test_a_lossy_mode_is_suggested_and_never_on(
    make: Callable[..., Path],
    loss: float | None,
    skipped: float,
    storage_bytes_per_s: int,
    more: tuple[str, ...],
    is_suggested: bool,
) -> None:
    profile = board(storage_bytes_per_s=storage_bytes_per_s, storage_latency_ns=1, memory_budget_bytes=BUDGET)
    bundle = make(profile)
    floor = json.loads(call(bundle, "--json").stdout)["memory"]["floor_bytes"]
    shutil.rmtree(bundle)
    bundle = make(replace(profile, memory_budget_bytes=floor + (8 << 10)))
    if loss is not None:
        record(bundle, loss, skipped)
    result = call(bundle, "--json", *more)
    told = json.loads(result.stdout)
    text = (
        "suggestion: --lossy 'dynamic-precision 0.6,1' reads 67% less of missed experts, at a measured loss of 0.40% "
    )
    assert (text in result.stderr) is is_suggested and result.stderr.count("suggestion") == is_suggested
    assert told["device"]["suggestion"] == ("--lossy 'dynamic-precision 0.6,1'" if is_suggested else None)
    assert ("exact" in told["mode"]) is not bool(more)


@pytest.mark.parametrize("interval", [None, [0.0], ["a", "b"], {"low": 0.0, "high": 1.0}])
def test_a_damaged_record_suggests_nothing(make: Callable[..., Path], interval: object) -> None:
    bundle = make(board(storage_bytes_per_s=1))
    record(bundle, 0.001)
    path = bundle.with_name("board-moec.modes.json")
    plain = json.loads(path.read_text())
    plain["rows"][0]["loss"]["interval95"] = interval
    path.write_text(json.dumps(plain))
    told = call(bundle, "--expert-cache", "25%")
    assert told.exception is None and "suggestion" not in told.stderr


def test_nothing_is_suggested_on_another_machine(make: Callable[..., Path]) -> None:
    bundle = make(board(threads=PROCESSORS + 1, storage_bytes_per_s=1))
    record(bundle, 0.001)
    assert "suggestion" not in call(bundle, "--expert-cache", "25%").stderr
