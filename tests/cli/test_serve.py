"""`moec serve`: the name of the model, and what it says at its start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Invoke

EXAMPLE = Path(__file__).parents[2] / "examples" / "bundle"


@pytest.mark.parametrize("name", ["", "a\nb", "a\x1b[31m", "x" * 201])
def test_a_name_that_no_line_can_have_is_refused(invoke: Invoke, name: str) -> None:
    result = invoke("serve", EXAMPLE, "--name", name)
    assert result.exit_code == 1 and "`--name` must have 1 to 200 visible characters" in result.stderr


def test_other_machines_need_a_key_file(invoke: Invoke, tmp_path: Path) -> None:
    open_host = invoke("serve", EXAMPLE, "--host", "0.0.0.0")
    assert open_host.exit_code == 1 and "no key is set" in open_host.stderr
    short = tmp_path / "key"
    short.write_text("short\n")
    refused = invoke("serve", EXAMPLE, "--host", "0.0.0.0", "--api-key-file", short)
    assert refused.exit_code == 1 and "must be a key of 8 or more" in refused.stderr
    origin = invoke("serve", EXAMPLE, "--cors-origin", "*")
    assert origin.exit_code == 1 and "`--cors-origin` must be" in origin.stderr


def said_at_start(*options: str) -> list[str]:
    """Return the lines of a server up to that with its address."""
    command = [sys.executable, "-m", "moec.cli.main", "serve", *options, "--port", "0"]
    said = list[str]()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if line.startswith("serving "):
                break
        process.kill()
    return said


def test_an_installed_bundle_has_its_own_name(tmp_path: Path) -> None:
    """`current` is a link to a folder whose name changes with each update."""
    link = tmp_path / "current"
    link.symlink_to(EXAMPLE)
    last = said_at_start(str(link), "--slots", "1")[-1]
    assert last.startswith("serving `model` at ") and last.endswith("1 answer at once\n")


def test_the_start_says_how_tokens_are_drawn(bundle: Path) -> None:
    """The example recommends the likeliest token. The tiny bundle recommends nothing."""
    said = said_at_start(str(EXAMPLE))[2]
    assert said.startswith("sampling by generation_config.json of the bundle: the likeliest token (temperature 0)")
    assert said_at_start(str(bundle))[1] == "sampling by default: temperature 1; requests may say otherwise\n"


def test_the_start_says_for_which_task_the_verdict_holds(bundle: Path) -> None:
    """The tiny bundle was compiled without a target, so it has no verdict."""
    said = said_at_start(str(EXAMPLE))
    assert said[0].startswith("mode: ")
    assert said[1] == "verdict: supported for gsm8k; other tasks were not measured\n"
    assert not [line for line in said_at_start(str(bundle)) if line.startswith("verdict")]


def test_the_start_says_how_the_memory_is_divided() -> None:
    """A slot of the example: 6 layers x 4 heads x 32 numbers of keys and as many of values, 512 tokens, 4 bytes."""
    said = said_at_start(str(EXAMPLE), "--slots", "2", "--memory", "210MiB")
    at = said.index("memory budget 210.0 MiB\n")
    parts = [line.split(maxsplit=2) for line in said[at + 1 : -1]]
    sizes = [float(number) * {"KiB": 1 / 1024, "MiB": 1.0}[unit] for number, unit, _ in parts]
    assert sum(sizes) == pytest.approx(210, abs=0.5)
    assert any(text.startswith("2 slots of 3.0 MiB: keys and values of 512 tokens") for *_, text in parts)
    fixed = said_at_start(str(EXAMPLE), "--slots", "1", "--expert-cache", "50%")
    assert any(line.startswith("memory at most") for line in fixed)
    assert any(line.endswith("1.0 MiB  expert cache\n") for line in fixed)
