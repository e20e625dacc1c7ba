"""Every option of a command line arrives at its destination, and every field of the options has a command line."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from moec.cli.main import cli
from moec.cli.options.set_option import SetOption
from moec.compiler.request.options import CompileOptions
from moec.compiler.request.request import CompileRequest
from moec.compiler.request.targets import Target
from moec.manifests.errors import OptionError
from moec.profiles.loading import load_profile
from moec.runtime.engine.beam import BeamOptions
from moec.runtime.options.runtime import RuntimeOptions
from moec.runtime.text.sampling import SamplingOptions

from .command_lines import COMPILES, ENGINE, RUNS, SHOWN_ELSEWHERE, Given, Line

LINES = {**RUNS, **COMPILES}
STOPPED = "the seam is reached"
CASES = [(name, parameter) for name, line in LINES.items() for parameter in line.given]
# Field -> reason why no command line sets it.
NOT_OFFERED = {
    (BeamOptions, "early_stopping"): "of the library alone",
    (SamplingOptions, "presence_penalty"): "of the server alone",
    (SamplingOptions, "frequency_penalty"): "of the server alone",
    (SamplingOptions, "logit_bias"): "of the server alone",
    (RuntimeOptions, "other_bytes"): "memory of the server around the engine",
    (CompileRequest, "check_companions"): "checks of the runtime",
    (CompileRequest, "talk"): "the log and the progress of the terminal",
    (CompileRequest, "disk"): "replaced by tests that let it fail",
    (CompileRequest, "shared"): "set for each device of several, see test_compile_devices.py",
}
# Class -> path of its fields in the arguments of a seam, and the seams.
PLACES = {
    RuntimeOptions: ("options.", {ENGINE}),
    SamplingOptions: ("sampling.", {"moec.runtime.engine.engine.Engine.generate"}),
    BeamOptions: ("options.", {"moec.runtime.engine.beam.beam_search"}),
    CompileOptions: ("request.options.", {"moec.compiler.pipeline.compile_checkpoint"}),
    CompileRequest: ("request.", {"moec.compiler.pipeline.compile_checkpoint"}),
}


@pytest.fixture(scope="module")
def folder(checkpoint: Path, two_version_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the command lines: a bundle, a model, prompts, texts and a trace."""
    folder = tmp_path_factory.mktemp("lines")
    (folder / "bundle").symlink_to(two_version_bundle)
    (folder / "model").symlink_to(checkpoint)
    (folder / "prompts.jsonl").write_text(json.dumps({"asked": "once"}) + "\n")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two", "four")))
    (folder / "text.txt").write_text("each byte of this is a token, so there are enough")
    recorded = (
        "bench {folder}/bundle --text {folder}/text.txt --tokens 6 --prompt-tokens 3 --trace-out {folder}/run.trace"
    )
    with pytest.MonkeyPatch.context() as patch:
        measure_nothing(patch)
        done = CliRunner().invoke(cli, [*words(recorded, folder), "--expert-cache", "50%"])
    assert done.exit_code == 0, done.stderr
    return folder


def measure_nothing(patch: pytest.MonkeyPatch) -> None:
    """Let `moec bench` use a known profile instead of measuring this machine."""
    laptop = load_profile("laptop")
    patch.setattr("moec.profiles.probe.probe_host", lambda place, request_bytes: laptop)
    patch.setattr("moec.runtime.memory.bandwidth.read_bytes_per_s", lambda size, threads: 8_000_000_000)


def words(text: str, folder: Path) -> list[str]:
    return [word.replace("{folder}", str(folder)) for word in shlex.split(text)]


def follow(line: Line, folder: Path, is_silent: bool = False) -> SimpleNamespace:
    """Return the arguments of the seam of a line by parameter name. `kernels` is the chosen instruction set.

    is_silent: leave out all options except those that the line needs.
    """
    seen = SimpleNamespace(kernels=None)
    owner, name = located(line.seam)
    called = inspect.signature(getattr(owner, name))

    def stop(*arguments: Any, **named: Any) -> Any:
        vars(seen).update(called.bind(*arguments, **named).arguments)
        raise OptionError(STOPPED)

    target = folder / ("model" if line.command == "compile" else "bundle")
    told = [] if is_silent else [word for given in line.given.values() for word in words(given.words, folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, stop)
        patch.setattr("moec.runtime.kernels.select", lambda kernels: vars(seen).update(kernels=kernels))
        measure_nothing(patch)
        patch.chdir(folder)
        (folder / "x").write_text("{}\n")
        result = CliRunner().invoke(cli, [line.command, str(target), *words(line.more, folder), *told])
    assert result.exit_code == 1 and STOPPED in result.stderr, result.output
    return seen


def located(seam: str) -> tuple[Any, str]:
    """Return the module or class that has a seam, and the name of the seam there."""
    parts = seam.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise LookupError(seam)


@pytest.fixture(scope="module")
def arrived(folder: Path) -> Callable[[str], SimpleNamespace]:
    """Arguments of the seam of each line. Every line is followed once."""
    found: dict[str, SimpleNamespace] = {}

    def of(name: str) -> SimpleNamespace:
        if name not in found:
            found[name] = follow(LINES[name], folder)
        return found[name]

    return of


def reached(start: Any, way: str) -> Any:
    """Return the value at the end of a path of attributes, keys and indices."""
    for step in way.split("."):
        if isinstance(start, dict):
            start = start[step]
        else:
            start = start[int(step)] if step.isdecimal() else getattr(start, step)
    return start


def in_folder(value: Any, folder: Path) -> Any:
    """Return the value with the name of the folder in it."""
    if isinstance(value, (tuple, list)):
        return type(value)(in_folder(each, folder) for each in value)
    if isinstance(value, (str, Path)):
        return type(value)(str(value).replace("{folder}", str(folder)))
    return value


@pytest.mark.parametrize(("line", "parameter"), CASES)
def test_an_option_arrives(arrived: Callable[[str], SimpleNamespace], folder: Path, line: str, parameter: str) -> None:
    given = LINES[line].given[parameter]
    assert reached(arrived(line), given.way) == in_folder(given.value, folder)


@pytest.mark.parametrize("name", sorted({line.command for line in LINES.values()}))
def test_every_parameter_of_a_command_has_a_line(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    known = {parameter for line in LINES.values() if line.command == name for parameter in line.given} - {""}
    elsewhere = SHOWN_ELSEWHERE[name]
    parameters = {str(parameter.name) for parameter in command.params} - {"set", "help_all"}
    parameters |= {name for option in command.params if isinstance(option, SetOption) for name in option.table}
    assert known | set(elsewhere) == parameters and not known & set(elsewhere)
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [test for test in elsewhere.values() if not re.search(rf"^def {test}\(", tests, re.MULTILINE)] == []


def default_of(field: Field[Any]) -> Any:
    """Return the default of a field, or MISSING."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def lines_of(kind: type) -> Iterator[tuple[str, Given]]:
    """Return the fields of a class that lines give, and their parameters."""
    prefix, seams = PLACES[kind]
    for line in LINES.values():
        for given in line.given.values():
            if line.seam in seams and given.way.startswith(prefix):
                yield given.way.removeprefix(prefix).split(".")[0], given


@pytest.mark.parametrize("kind", PLACES)
def test_every_field_is_given_a_value_that_is_not_its_default(kind: type) -> None:
    by_name = {field.name: field for field in fields(kind)}
    told = {name for name, given in lines_of(kind) if given.value != default_of(by_name[name])}
    assert told == {name for name in by_name if (kind, name) not in NOT_OFFERED}


def test_a_silent_command_line_leaves_the_defaults(folder: Path) -> None:
    of_command = {"generate": {"slots": 32}, "eval": {"slots": 32}}
    for name in ("run", "generate", "eval", "bench", "tune"):
        seen = follow(LINES[name], folder, is_silent=True)
        assert seen.options == RuntimeOptions(**of_command.get(name, {})), name
        assert seen.kernels is None
    assert follow(LINES["run, sampling"], folder, is_silent=True).sampling == SamplingOptions()
    silent = Line("compile", LINES["compile"].seam, {}, "--size 3MiB --device laptop")
    request = follow(silent, folder).request
    assert request.options == CompileOptions(Target("size", 3 << 20))
    told = {"source", "output", "options", "profile", "open_runtime", "talk", "disk", "templates"}
    told |= {"draw_card", "check_companions"}
    for field in fields(CompileRequest):
        assert field.name in told or getattr(request, field.name) == default_of(field), field.name
