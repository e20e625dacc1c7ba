"""The group: help, version, and the exit of every kind of error."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from moec.cli.documents import commands_page
from moec.cli.exit_codes import EXIT_FAULT
from moec.cli.main import cli
from moec.manifests.errors import ChecksumMismatch, OptionError

from .conftest import Invoke


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Replace `verify` by a command that raises."""

    def install(problem: BaseException) -> None:
        @click.command("verify")
        def command() -> None:
            raise problem

        monkeypatch.setattr("moec.cli.commands.bundles.verify.verify_command", command)

    return install


def test_help_names_every_command_and_its_purpose(invoke: Invoke) -> None:
    result = invoke("--help")
    assert result.exit_code == 0 and result.stderr == ""
    for name in ("run", "eval", "inspect", "verify", "bench"):
        assert re.search(rf"^  {name} +[A-Z].+\.$", result.stdout, re.M), name


def test_every_command_has_help_with_an_example(invoke: Invoke) -> None:
    for name in cli.list_commands(click.Context(cli)):
        result = invoke(name, "--help")
        assert result.exit_code == 0 and result.stderr == "", name
        if name != "demo":
            assert re.search(rf"^  .*moec {name} ", result.stdout, re.M), f"`moec {name} --help` shows no example"


def test_every_option_is_explained() -> None:
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None and command.help and command.short_help
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"`moec {name} {parameter.opts[0]}` has no help"


def test_version(invoke: Invoke) -> None:
    assert re.fullmatch(r"moec \S+\n", invoke("--version").stdout)


def test_usage_errors_leave_with_2(invoke: Invoke) -> None:
    assert invoke("unknown").exit_code == 2
    result = invoke("run")
    assert result.exit_code == 2 and result.stdout == "" and "Usage: moec run" in result.stderr
    assert invoke("run", "x", "--prompt", "p", "--set", "policy=fifo").exit_code == 2


def test_an_error_is_a_sentence_and_a_hint(invoke: Invoke, failing) -> None:  # type: ignore[no-untyped-def]
    failing(OptionError("`--size 2G` is not a size", "write `2GiB`"))
    result = invoke("verify")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: `--size 2G` is not a size\nhint: write `2GiB`\n"


def test_an_error_without_a_remedy_has_no_hint(invoke: Invoke, failing) -> None:  # type: ignore[no-untyped-def]
    failing(ChecksumMismatch("`x` differs from its digest"))
    result = invoke("verify")
    assert (result.exit_code, result.stderr) == (3, "error: `x` differs from its digest\n")


def test_a_missing_extra_names_the_command_that_installs_it(invoke: Invoke, failing) -> None:  # type: ignore[no-untyped-def]
    failing(ModuleNotFoundError("No module named 'torch'", name="torch"))
    result = invoke("verify")
    assert result.exit_code == 1
    assert result.stderr == (
        'error: this command needs the package `torch`, which is not installed\nhint: pip install "moec[compile]"\n'
    )


def test_another_missing_module_is_a_fault(invoke: Invoke, failing) -> None:  # type: ignore[no-untyped-def]
    failing(ModuleNotFoundError("No module named 'nonsense'", name="nonsense"))
    assert invoke("verify").exit_code == EXIT_FAULT


def test_a_fault_shows_the_traceback_and_asks_for_a_report(invoke: Invoke, failing) -> None:  # type: ignore[no-untyped-def]
    failing(ZeroDivisionError("surprise"))
    result = invoke("verify")
    assert (result.exit_code, result.stdout) == (70, "")
    assert "Traceback" in result.stderr and "ZeroDivisionError: surprise" in result.stderr
    assert "please report" in result.stderr.splitlines()[-1]


def test_an_interrupt_leaves_with_130(invoke: Invoke, failing) -> None:  # type: ignore[no-untyped-def]
    failing(KeyboardInterrupt())
    result = invoke("verify")
    assert result.exit_code == 130 and result.stderr.strip() == "interrupted"


def test_without_standalone_mode_errors_reach_the_caller(failing) -> None:  # type: ignore[no-untyped-def]
    failing(OptionError("no"))
    with pytest.raises(OptionError):
        cli.main(["verify"], prog_name="moec", standalone_mode=False)


def test_page_of_commands_has_not_drifted() -> None:
    page = Path(__file__).parents[2] / "docs" / "cli.md"
    assert page.read_text() == commands_page(), "run `make docs`"


@pytest.mark.parametrize(
    ("word", "end"),
    [
        ("runn", "Did you mean `run`?"),
        ("comple", "`compile` or `compare`?"),
        ("inspct", "`inspect`?"),
        ("z" * 999, "zzz'."),
    ],
)
def test_an_unknown_command_is_answered_with_similar_ones(invoke: Invoke, word: str, end: str) -> None:
    result = invoke(word)
    assert result.exit_code == 2 and len(result.stderr) < 300
    assert result.stderr.rstrip().endswith(end)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_a_script_that_completes(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.setenv("_MOEC_COMPLETE", f"{shell}_source")
    result = invoke()
    assert result.exit_code == 0 and f"_MOEC_COMPLETE={shell}_complete" in result.stdout
