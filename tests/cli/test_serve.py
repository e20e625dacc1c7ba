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


def test_the_start_says_what_is_served(tmp_path: Path) -> None:
    """`current` is a link to a folder whose name changes with each update. The example recommends the likeliest token.

    A slot of the example: 6 layers x 4 heads x 32 numbers of keys and as many of values, 512 tokens, 4 bytes.
    """
    link = tmp_path / "current"
    link.symlink_to(EXAMPLE)
    said = said_at_start(str(link), "--slots", "2", "--memory", "210MiB")
    assert said[0].startswith("mode: ")
    assert said[1] == "verdict: supported for gsm8k; other tasks were not measured\n"
    assert said[2].startswith("sampling by generation_config.json of the bundle: the likeliest token (temperature 0)")
    assert said[-1].startswith("serving `model` at ") and said[-1].endswith("2 answers at once\n")
    at = said.index("memory budget 210.0 MiB\n")
    parts = [line.split(maxsplit=2) for line in said[at + 1 : -1]]
    sizes = [float(number) * {"KiB": 1 / 1024, "MiB": 1.0}[unit] for number, unit, _ in parts]
    assert sum(sizes) == pytest.approx(210, abs=0.5)
    assert any(text.startswith("2 slots of 3.0 MiB: keys and values of 512 tokens") for *_, text in parts)


def test_a_start_with_a_fixed_cache_says_what_memory_it_takes_at_most() -> None:
    said = said_at_start(str(EXAMPLE), "--slots", "1", "--expert-cache", "50%")
    assert any(line.startswith("memory at most") for line in said)
    assert any(line.endswith("986.0 KiB  expert cache\n") for line in said)
    assert said[-1].endswith("1 answer at once\n")


def test_a_bundle_without_target_and_settings_has_no_verdict_and_the_default_sampling(bundle: Path) -> None:
    said = said_at_start(str(bundle))
    assert not [line for line in said if line.startswith("verdict")]
    assert said[1] == "sampling by default: temperature 1; requests may say otherwise\n"
