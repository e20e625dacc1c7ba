"""`--as`, `--set`, help texts, and spellings of earlier versions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest

from moec.cli.commands.compiling.compile import compile_command
from moec.cli.main import cli
from moec.cli.options.set_option import COMPILE_SETTINGS, RUN_SETTINGS, spelled
from moec.cli.options.systems import COMPILED_SYSTEMS, SYSTEMS, load_system
from moec.runtime.options.lossy import PUBLISHED
from moec.runtime.options.runtime import RuntimeOptions
from tests.tiny_compile import save_model, save_texts

from .conftest import Invoke

ROOT = Path(__file__).parents[2]
PROMPT = ("--prompt", "a", "--max-new-tokens", 2)
FORMER_FLAGS = ("no-verify", "no-learned-routers")
FORMER_MODES = ("dynamic-precision", "big-little", "cache-routing", "expert-activations", "mode-loss")


@pytest.mark.parametrize("name", SYSTEMS)
def test_each_prescription_is_an_option_with_its_section(name: str) -> None:
    system = load_system(name)
    run = {field: None if (field, value) == ("lossy", PUBLISHED) else value for field, value in system.run.items()}
    assert RuntimeOptions(**run) != RuntimeOptions()
    names = {str(parameter.name) for parameter in compile_command.params} | set(COMPILE_SETTINGS)
    assert set(system.compile) <= names and bool(system.compile) == (name in COMPILED_SYSTEMS)
    lines = (ROOT / "cli" / "systems" / f"{name}.toml").read_text().splitlines()
    prescribed = [line for line in lines if " = " in line and not line.startswith("title")]
    assert len(prescribed) == len(system.run) + len(system.compile) + len(system.needs)
    assert all(re.search(r"# (?:III-[ABC]\d?|\d\.\d): ", line) for line in prescribed)


def test_a_system_is_printed_and_the_command_line_comes_first(invoke: Invoke, two_version_bundle: Path) -> None:
    run = ("run", two_version_bundle, *PROMPT, "--expert-cache", "60%")
    told = invoke(*run, "--as", "mobile").stderr
    assert "as MoBiLE: --lossy 'big-little gamma=0.7,k=K/2' --set prefetch=lookahead" in told
    assert "LOSSY (big-little gamma=0.7,k=K/2)" in told
    told = invoke(*run, "--as", "mobile", "--lossy", "big-little gamma=0.5", "--set", "prefetch=off").stderr
    assert "as MoBiLE: --set learned-routers=no\n" in told and "big-little gamma=0.5,k=K/2" in told


def test_repeated_modes_are_joined(invoke: Invoke, two_version_bundle: Path) -> None:
    modes = ("big-little gamma=0.7,k=K/2", "cache-routing margin=0.2,drop=0")
    run = ("run", two_version_bundle, *PROMPT, "--expert-cache", "60%")
    told = invoke(*run, "--lossy", modes[0], "--lossy", modes[1]).stderr
    assert f"LOSSY ({' + '.join(modes)})" in told
    refused = invoke(*run, "--lossy", "published", "--lossy", modes[0])
    assert refused.exit_code == 1 and "were measured without other modes" in refused.stderr


@pytest.mark.parametrize(
    ("name", "line"),
    [("edgemoe", "policy edgemoe, prefetch path until routed"), ("mobile", "LOSSY (big-little gamma=0.7,k=K/2)")],
)
def test_a_run_follows_a_system(invoke: Invoke, name: str, line: str) -> None:
    """The shipped example has what both need: statistics, and no low versions."""
    run = ("run", ROOT / "examples" / "bundle", *PROMPT, "--expert-cache", "50%")
    done = invoke(*run, "--as", name)
    assert done.exit_code == 0 and line in done.stderr, done.stderr


@pytest.mark.slow
def test_a_compile_for_hobbit_runs_as_hobbit(invoke: Invoke, tmp_path: Path) -> None:
    model, texts = save_model(tmp_path / "model"), save_texts(tmp_path / "texts")
    line = ("compile", model, "--uniform", "8", "--data", texts, "-o", tmp_path / "out-moec", "--as", "hobbit")
    done = invoke(*line)
    assert done.exit_code == 0 and "as HOBBIT: --fallback-bits 2" in done.stderr, done.stderr
    done = invoke("run", tmp_path / "out-moec", *PROMPT, "--expert-cache", "60%", "--as", "hobbit")
    assert done.exit_code == 0 and "LOSSY (dynamic-precision 0." in done.stderr, done.stderr
    assert "prefetch lookahead to the first miss" in done.stderr and "policy hobbit" in done.stderr


def test_a_bundle_that_lacks_what_a_system_needs_is_refused(
    invoke: Invoke, mixed_bundle: Path, two_version_bundle: Path
) -> None:
    refused = invoke("run", mixed_bundle, *PROMPT, "--as", "hobbit")
    assert refused.exit_code == 1 and "has no low versions, which HOBBIT needs" in refused.stderr
    assert "compile it with --as hobbit or --fallback-bits 2" in refused.stderr
    for name in ("edgemoe", "twiddler"):
        refused = invoke("run", two_version_bundle, *PROMPT, "--as", name)
        assert refused.exit_code == 1 and "has no statistics" in refused.stderr and "--data DATA" in refused.stderr


def test_old_spellings_name_the_new_ones(invoke: Invoke) -> None:
    for name in (*map(spelled, RUN_SETTINGS), *FORMER_FLAGS, *FORMER_MODES):
        refused = invoke("run", "x", *PROMPT, f"--{name}", "1")
        assert refused.exit_code == 2 and f"`--{name}` is now `--" in refused.stderr, name
    refused = invoke("compile", "x", "--path-keys", "pairs")
    assert refused.exit_code == 2 and "is now `--set path-keys=VALUE`" in refused.stderr
    assert "No such option" in invoke("run", "x", *PROMPT, "--never-there", "1").stderr


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("polcy=lru", "write `policy=VALUE`"),
        ("policy", "sets nothing"),
        ("policy=fifo", "expected one of lrfu"),
        ("readers=many", "expected a whole number, 1 to 32"),
        ("verify=maybe", "expected `yes` or `no`"),
    ],
)
def test_a_setting_that_means_nothing_is_wrong_usage(invoke: Invoke, setting: str, told: str) -> None:
    refused = invoke("run", "x", *PROMPT, "--set", setting)
    assert refused.exit_code == 2 and told in refused.stderr


def test_settings_are_listed_once(invoke: Invoke) -> None:
    told = json.loads(invoke("settings", "--json").stdout)
    assert [row["name"] for row in told["run"]] == list(map(spelled, RUN_SETTINGS))
    assert [row["name"] for row in told["compile"]] == list(map(spelled, COMPILE_SETTINGS))
    page = (ROOT / "docs" / "cli.md").read_text()
    for row in (*told["run"], *told["compile"]):
        assert row["text"] in page and f"{row['name']}=" in invoke("settings").stdout
        assert len(re.findall(rf"^\* `{row['name']}=", page, re.MULTILINE)) == 1


@pytest.mark.parametrize(("name", "rows"), [("run", 50), ("compile", 70)])
def test_help_fits_on_a_screen(invoke: Invoke, name: str, rows: int) -> None:
    short, whole = invoke(name, "--help").stdout, invoke(name, "--help-all").stdout
    assert short.count("\n") <= rows < whole.count("\n") and "More with --help-all: " in short
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert all(option in whole for parameter in command.params for option in parameter.opts if option.startswith("--"))


def test_the_reference_stays_short() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert len(re.findall(r"^\* `-", page, re.MULTILINE)) <= 180
