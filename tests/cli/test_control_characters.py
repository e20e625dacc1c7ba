"""No control character of a bundle, a path or an argument reaches stdout or stderr."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from click.testing import CliRunner

from moec.cli.main import cli
from moec.cli.terminal import output
from moec.manifests.errors import OptionError
from tests.gates.damage import plain_manifest, seal

from .conftest import Invoke

TITLE = "\x1b]0;owned\x07\x9b31m\u202e\u2066\u061c\r\nmoec: all is well"


def drives_a_terminal(text: str) -> set[str]:
    """Return whether a character is a control character except line end and tab, or changes the direction of text."""
    marks = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    return {each for each in text if each in marks or (unicodedata.category(each) == "Cc" and each not in "\n\t")}


def test_every_control_character_is_made_visible() -> None:
    everything = "".join(map(chr, range(0x3000)))
    found = output.shown(everything)
    assert drives_a_terminal(everything) and not drives_a_terminal(found)
    assert len(drives_a_terminal(everything)) == 32 + 1 + 32 - 2 + 12, "the test's own idea of them"
    assert output.shown("é\t\u4e16\n\U0001f600 e\u0301") == "é\t\u4e16\n\U0001f600 e\u0301", "text stays as it is"
    assert output.shown("\x1b\r\x85\u202e\udcff") == r"\x1b\r\x85\u202e\udcff"
    found.encode()


@pytest.mark.parametrize("where", ["table", "header", "facts"])
def test_a_value_keeps_to_its_line(where: str) -> None:
    text = {
        "table": lambda: output.table([("a", TITLE)], ("b", "c")),
        "header": lambda: output.table([("a", "b")], ("c", "d")) + output.table([(TITLE, 1)]),
        "facts": lambda: output.facts([("name", TITLE), ("other", 1)]),
    }[where]()
    assert not drives_a_terminal(text) and "\nmoec: all is well" not in text


def test_an_error_keeps_to_its_line_but_a_list_of_problems_has_several() -> None:
    runner = CliRunner()
    with runner.isolation(color=True) as (_, err, _):
        output.error(OptionError(f"`{TITLE}` has 2 problems:\n- one\n- two", f"hint {TITLE}"))
        written = err.getvalue().decode()
    own = "\x1b[31m\x1b[1merror:\x1b[0m", "\x1b[36mhint:\x1b[0m"
    for style in own:
        assert style in written, "our own colours stay"
        written = written.replace(style, "")
    assert not drives_a_terminal(written) and len(written.splitlines()) == 4
    assert "\nmoec: all is well" not in written


def test_json_says_the_same_without_them() -> None:
    runner = CliRunner()
    with runner.isolation() as (out, _, _):
        output.data_json({"text": TITLE + "\x7f\u4e16"})
        written = out.getvalue().decode()
    assert not drives_a_terminal(written) and json.loads(written) == {"text": TITLE + "\x7f\u4e16"}
    assert "\u4e16" in written


@pytest.mark.parametrize("field", ["name", "producer", "layout", "family", "profile", "feature"])
def test_a_bundle_cannot_drive_the_terminal(invoke: Invoke, own_bundle: Path, field: str) -> None:
    plain = plain_manifest(own_bundle)
    if field in ("name", "producer", "layout"):
        plain[field] = TITLE
    elif field == "family":
        plain["model"]["family"] = TITLE
    elif field == "profile":
        plain["device"]["profile"] = TITLE
    else:
        plain["required_cpu_features"] = [TITLE]
    seal(own_bundle, plain)
    said = ""
    for arguments in (
        ("inspect",),
        ("inspect", "--json"),
        ("verify",),
        ("run", "--prompt", "x", "--max-new-tokens", 1),
    ):
        command, *options = arguments
        result = invoke(command, own_bundle, *options)
        assert result.exit_code in (0, 1, 3), result.stderr
        if command != "run" or result.exit_code:  # text of a model is printed unchanged
            said += result.stdout
        said += result.stderr
    assert not drives_a_terminal(said) and "\nmoec: all is well" not in said
    assert r"\x1b]0;owned\x07" in said or r"\u001b]0;owned\u0007" in said, "the value is told somewhere"


@pytest.mark.parametrize(
    "arguments",
    [
        (TITLE,),
        ("run", f"--{TITLE}"),
        ("run", TITLE, "--prompt", "x"),
        ("run", "b", "--set", TITLE),
        ("run", "b", "--threads", TITLE),
        ("verify", "b", TITLE),
        ("eval", "b", "--data", TITLE),
        ("compile", TITLE, "--uniform", "4"),
    ],
)
def test_an_argument_cannot_drive_the_terminal(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exit_code in (1, 2) and result.stdout == ""
    assert not drives_a_terminal(result.stderr), result.stderr
